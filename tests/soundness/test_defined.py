"""What only the ranks compute may be undefined where the sequential program is defined: then there is a condition."""

import contextlib
import importlib
import json
import textwrap

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import command

import graphguard as gg
from graphguard.api import capture_function
from graphguard.capture.front import ranges_of
from graphguard.capture.torch.relation.inputs import bounds_of
from graphguard.engine.algebra.domain import PARTIAL
from graphguard.engine.numeric.functions import FUNCTIONS
from graphguard.engine.proof import Condition, Proof
from graphguard.engine.prove import prove
from graphguard.graph.ir import Source
from graphguard.lemmas.known import all_lemmas
from graphguard.report.report import Report
from graphguard.verdict.judge import Judgement
from graphguard.verdict.verdict import report_of

XY = {"x": gg.Input((4,)), "y": gg.Input((4,))}
OF_FLOATS = {  # what is not defined everywhere, and the condition
    "div": (lambda x, y: y / x, "x != 0"),
    "reciprocal": (lambda x, y: x.reciprocal(), "x != 0"),
    "remainder": (lambda x, y: torch.remainder(y, x), "x != 0"),
    "fmod": (lambda x, y: torch.fmod(y, x), "x != 0"),
    "floor_divide": (lambda x, y: torch.floor_divide(y, x), "x != 0"),
    "rounded_division": (lambda x, y: torch.div(y, x, rounding_mode="trunc"), "x != 0"),
    "addcdiv": (lambda x, y: torch.addcdiv(y, y, x), "x != 0"),
    "inverse_cube": (lambda x, y: x**-3, "x != 0"),
    "log": (lambda x, y: x.log(), "x > 0"),
    "log2": (lambda x, y: x.log2(), "x > 0"),
    "log10": (lambda x, y: x.log10(), "x > 0"),
    "log1p": (lambda x, y: x.log1p(), "1 + x > 0"),
    "exp_of_log": (lambda x, y: x.log().exp(), "x > 0"),
    "sqrt": (lambda x, y: x.sqrt(), "x >= 0"),
    "rsqrt": (lambda x, y: x.rsqrt(), "x > 0"),
    "root_of_product": (lambda x, y: (x * y).sqrt(), "x y >= 0"),
    "power_and_a_half": (lambda x, y: x**1.5, "x >= 0"),
    "pow": (lambda x, y: x**y, "x > 0"),
    "xlogy": (lambda x, y: torch.xlogy(y, x), "x > 0"),
    "asin": (lambda x, y: x.asin(), "-1 <= x <= 1"),
    "acos": (lambda x, y: x.acos(), "-1 <= x <= 1"),
    "acosh": (lambda x, y: x.acosh(), "x >= 1"),
    "atanh": (lambda x, y: x.atanh(), "-1 < x < 1"),
    "tan": (lambda x, y: x.tan(), "cos(x) != 0"),
    "lgamma": (lambda x, y: x.lgamma(), "x is no whole number below 1"),
    "digamma": (lambda x, y: x.digamma(), "digamma is defined"),
    "logit": (lambda x, y: x.logit(), "logit is defined"),
    "erfinv": (lambda x, y: x.erfinv(), "erfinv is defined"),
    "inverse": (lambda x, y: torch.linalg.inv(torch.outer(x, y))[0], "linalg_inv_ex is defined"),
    "layer_norm": (lambda x, y: torch.nn.functional.layer_norm(x, (4,), eps=0.0), "a value in native_layer_norm != 0"),
    "deviation": (lambda x, y: x / x.std(), "the operand of div != 0"),
}
OF_WHOLE_NUMBERS = {
    "remainder": (lambda i, j: torch.remainder(i, j), "j != 0"),
    "floor_divide": (lambda i, j: i // j, "j != 0"),
    "fmod": (lambda i, j: torch.fmod(i, j), "j != 0"),
    "pow": (lambda i, j: i**j, "pow is defined"),
}
WAYS = {"minus": lambda y, made: y + made - made, "times_zero": lambda y, made: y + 0 * made}


def proof_of(sequential, distributed, inputs, mesh=2):
    """The proof alone, which no execution judges."""
    captured = capture_function(sequential, distributed, mesh={"tp": mesh}, inputs=inputs)
    return prove(
        captured.sequential,
        captured.world(),
        lemmas=all_lemmas(),
        ranges=ranges_of(captured.sequential, bounds_of(inputs)),
    )


def texts(proof, path="out"):
    assert path in proof.relations, proof.findings
    return [condition.text for condition in proof.conditions if path in condition.outputs]


def cancelled(table):
    """Everything of a table in one program: an output for each operation and each way in which its result goes away."""

    def kept(first, second):
        return second if second.is_floating_point() else first

    def ranks(**inputs):
        results = {name: made(*inputs.values()) for name, (made, _) in table.items()}
        return {
            f"{name}-{way}": undo(kept(*inputs.values()), made) for name, made in results.items() for way, undo in WAYS.items()
        }

    def sequential(**inputs):
        return {f"{name}-{way}": kept(*inputs.values()) * 1 for name in table for way in WAYS}

    return sequential, ranks


@pytest.mark.parametrize(
    ("table", "inputs"),
    [(OF_FLOATS, XY), (OF_WHOLE_NUMBERS, {"i": gg.Input((4,), dtype=torch.int64), "j": gg.Input((4,), dtype=torch.int64)})],
    ids=["floats", "whole-numbers"],
)
def test_what_goes_away_leaves_its_condition(table, inputs):
    proof = proof_of(*cancelled(table), inputs)
    for name, (_, condition) in table.items():
        for way in WAYS:
            assert condition in texts(proof, f"{name}-{way}"), name


def test_a_power_of_a_number_above_zero_is_above_zero():
    """As the speeds of rotary embeddings are. To minus infinity it is 0."""

    def ranks(x, y):
        masked = x.masked_fill(torch.arange(4) < 2, -torch.inf)
        return {name: y + 0 / each for name, each in (("above", 2.0**x), ("below", (-2.0) ** x), ("masked", 2.0**masked))}

    proof = proof_of(lambda x, y: dict.fromkeys(("above", "below", "masked"), y * 1), ranks, XY)
    assert texts(proof, "above") == []
    assert texts(proof, "below") != []
    assert "masked" not in proof.relations or texts(proof, "masked") != []


def test_nothing_is_kept_of_an_unwritten_tensor_or_of_infinity():
    """They are no numbers: they do not cancel, and zero times them is not zero. Not even where a package that jax brings has
    given numpy a bfloat16, in which it finds no infinities."""
    with contextlib.suppress(ImportError):
        importlib.import_module("ml_dtypes")
    made = {
        "empty": lambda x: torch.empty(4),
        "empty_like": torch.empty_like,
        "new_empty": lambda x: x.new_empty(4),
        "strided": lambda x: torch.empty_strided((4,), (1,)),
        "exp_of_empty": lambda x: torch.empty(4).exp(),
        "empty_as_itself": lambda x: (lambda e: (e == e).float())(torch.empty(4)) * x.exp(),
        "masked_empty": lambda x: torch.empty(4) * torch.tensor([0.0, 0.0, 0.0, 0.0]),
        "infinite": lambda x: torch.full((4,), float("inf")),
        "some_infinite": lambda x: torch.tensor([1.0, 2.0, float("inf"), 3.0]),
        "half": lambda x: torch.tensor([1.0, 2.0, float("nan"), 3.0], dtype=torch.bfloat16),
        "masked": lambda x: x.masked_fill(x > 0, float("-inf")),
    }

    def ranks(x):
        return {f"{name}-{way}": undo(x, make(x)) for name, make in made.items() for way, undo in WAYS.items()}

    def sequential(x):
        return {f"{name}-{way}": x * 1 for name in made for way in WAYS}

    assert not proof_of(sequential, ranks, {"x": gg.Input((4,))}).relations


def test_an_unwritten_tensor_that_is_overwritten_or_cut_off_is_no_matter():
    def padded(x, scale):
        buffer = torch.empty(6)
        buffer[:4] = x
        return (buffer * scale)[:4]

    inputs = {"x": gg.Input((4,)), "scale": gg.Input(())}
    assert texts(proof_of(lambda x, scale: x * scale, padded, inputs)) == []


DEFINED = {
    "sum_of_exponentials": lambda x, y: y / x.exp().sum(),
    "square_and_more": lambda x, y: y / (x * x + 1),
    "root_of_squares": lambda x, y: (x * x).sum().sqrt(),
    "deviation": lambda x, y: y / (x.std() + 1e-5),
    "layer_norm": lambda x, y: torch.nn.functional.layer_norm(x, (4,)),
    "normalized": lambda x, y: torch.nn.functional.normalize(x, dim=0),
    "softmax": lambda x, y: x.softmax(0).log(),
    "clamped": lambda x, y: y / x.clamp(min=0.5),
    "clamped_log": lambda x, y: x.clamp(1e-6, 1 - 1e-6).log1p(),
    "angle": lambda x, y: x.sin().asin() + x.tanh().atanh() + (x.cos() / 2).acos(),
    "share": lambda x, y: x.sigmoid().log() + (1 + x.sigmoid()).log2(),
    "constants": lambda x, y: torch.remainder(x, 3.0) + 2.0**y + x % 0.5,
    "positions": lambda x, y: y / (torch.arange(4) + 1),
    "count": lambda x, y: y / ((x > 0).sum() + 1),
    "distance": lambda x, y: y / (x - y).abs().clamp(min=1),
    "moments": lambda x, y: y / ((x * x).sqrt() + 1e-8),
}


def test_what_is_known_to_be_defined_has_no_condition():
    def ranks(x, y):
        return {name: y + 0 * make(x, y) for name, make in DEFINED.items()}

    proof = proof_of(lambda x, y: dict.fromkeys(DEFINED, y * 1), ranks, XY)
    assert [(name, texts(proof, name)) for name in DEFINED if texts(proof, name)] == []


def test_stated_bounds_of_inputs_are_used():
    inputs = {"x": gg.Input((4,), low=-0.5, high=0.5), "y": gg.Input((4,), low=0.25)}

    def ranks(x, y):
        return y + 0 * (x.asin() + y.log() + (x + 1).log() + 1 / (x - 2))

    def sharper(x, y):
        return y + 0 * (x + 0.25).log()

    assert texts(proof_of(lambda x, y: y * 1, ranks, inputs)) == []
    assert texts(proof_of(lambda x, y: y * 1, sharper, inputs)) == ["0.25 + x > 0"]


def test_what_the_sequential_program_does_as_well_is_defined():
    def sequential(x, y):
        return y + (y / x).log() + torch.remainder(y, x) + x.acosh()

    def whole(x, y):
        return y + x.logit()

    shards = {name: gg.Input((4,), gg.Shard(0)) for name in XY}
    assert texts(proof_of(sequential, sequential, shards)) == []
    assert texts(proof_of(whole, whole, XY)) == []


def test_elsewhere_the_sequential_program_says_nothing():
    """It divides by the first half, the ranks by all."""

    def sequential(x, y):
        return y[:2] / x[:2], y * 1

    def ranks(x, y):
        return y[:2] / x[:2], y + 0 * (y / x)

    proof = proof_of(sequential, ranks, XY)
    assert texts(proof, "0") == []
    assert texts(proof, "1") == ["x != 0"]


def test_a_condition_belongs_to_the_outputs_that_are_made_from_it():
    def ranks(x, y):
        return {"own": y * 1, "divided": dist_sum(y / x) * 0 + y}

    proof = proof_of(lambda x, y: {"own": y * 1, "divided": y * 1}, ranks, XY)
    assert [condition.outputs for condition in proof.conditions] == [("divided",)]
    assert set(proof.unconditional) == {"own"}


def dist_sum(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def test_what_raises_is_a_condition_of_all_outputs():
    """Nothing comes of a rank that raises."""
    inputs = {name: gg.Input((4,), dtype=torch.int64) for name in "ij"}
    proof = proof_of(lambda i, j: {"a": i * 1, "b": j * 1}, lambda i, j: {"a": i + 0 * (i // j), "b": j * 1}, inputs)
    assert texts(proof, "b") == ["j != 0"]


def test_an_operator_of_ones_own_may_be_undefined():
    @torch.library.custom_op("defined::inverse", mutates_args=())
    def inverse(x: torch.Tensor) -> torch.Tensor:
        return 1 / x

    @inverse.register_fake
    def _(x):
        return torch.empty_like(x)

    proof = proof_of(lambda x, y: y * 1, lambda x, y: y + 0 * inverse(x), XY)
    assert texts(proof) == ["x != 0"]
    assert texts(proof_of(lambda x, y: y * inverse(x), lambda x, y: y * inverse(x), XY)) == []


def test_every_function_that_descriptions_name_is_defined_or_in_the_table():
    """Its values at ordinary numbers, zero and whole numbers among them, are numbers unless its domain is in the table."""
    grid = np.array([-3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
    for name, function in FUNCTIONS.items():
        if name in PARTIAL or name == "pow":
            continue
        undefined = True
        for operands in (1, 2):
            for parameters in range(4):
                try:
                    with np.errstate(all="ignore"):
                        values = function(*np.meshgrid(*[grid] * operands), *[1] * parameters)
                except (TypeError, ValueError, AttributeError):
                    continue
                undefined = False
                assert np.isfinite(values).all(), name
                break
        assert undefined == (name in ("wrapped", "narrowed")), name


# ---------------------------------------------------------------------- verdicts
PROGRAM = """
    import torch
    import graphguard as gg

    XY = {"x": gg.Input((4,), low=-1.0, high=1.0), "y": gg.Input((4,))}

    @gg.check
    def close_to_a_pole():
        return gg.verify(lambda x, y: y * 1, lambda x, y: y + 0 * (y / (x - 0.123456)), mesh={"tp": 2}, inputs=XY)
"""


@pytest.fixture
def verify(folder, capsys):
    """`graphguard verify` of the program above: its exit code, and what it prints."""
    (folder / "poles.py").write_text(textwrap.dedent(PROGRAM).lstrip())
    return lambda *options: command(capsys, "verify", "poles.py", *options)[:2]


def test_a_condition_is_printed_beside_the_verdict(verify):
    code, text = verify()
    assert code == 0
    head, *_, last = text.splitlines()
    assert head == "verified where x - 0.123456 != 0, poles.py:8: poles.py::close_to_a_pole"
    assert last == "1 verified; 1 under conditions; all as expected"


def test_a_condition_is_a_failure_with_strict(verify):
    code, text = verify("--strict")
    assert code == 3
    head, *_, last = text.splitlines()
    assert head == "verified where x - 0.123456 != 0, poles.py:8 (--strict allows no conditions): poles.py::close_to_a_pole"
    assert last == "1 verified; 1 under conditions, which is a failure with --strict; 1 not as expected"


def test_a_condition_is_a_field_of_the_json(verify):
    code, text = verify("--strict", "--output-format", "json")
    assert code == 3
    (check,) = json.loads(text)["checks"]
    assert check["conditions"] == [{"text": "x - 0.123456 != 0", "source": "poles.py:8", "outputs": ["out"]}]
    assert (check["verdict"], check["strict"]) == ("verified", True)


@pytest.mark.parametrize("style", ["junit", "github", "sarif"])
def test_a_condition_is_in_every_format(verify, style):
    _, text = verify("--strict", "--output-format", style)
    assert "is verified where x - 0.123456 != 0" in text


def test_a_difference_under_a_condition_refutes():
    """The proof says nothing there, so it is not contradicted."""
    report = gg.verify(lambda x, y: y * 1, lambda x, y: y + 0 * x.log(), mesh={"tp": 2}, inputs=XY)
    assert report.verdict == "refuted"
    assert report.counterexample is not None
    assert not report.relation
    first, *_ = report.findings
    assert first.kind == "undefined-value" and first.law is None and first.distributed is not None
    assert first.message.startswith("out: the relation holds where x > 0; here the sequential program is defined")


def test_a_report_lists_many_conditions():
    places = tuple(Condition(f"x{n} != 0", Source("model.py", n), ("out",)) for n in range(3))
    report = report_of(Proof(conditions=places), Judgement(trials=3), [])
    assert str(report).splitlines()[0] == "verified where x0 != 0, model.py:0 and x1 != 0, model.py:1, and 1 more"
    assert "  where: x2 != 0, model.py:2" in str(report).splitlines()
    assert str(Report("verified")).splitlines()[0] == "verified"


def test_what_a_mask_takes_away_is_to_be_taken_away_on_the_ranks_too():
    """The sequential program is defined where x is 0, though it divides by it."""

    def masked(x, y):
        return torch.where(x != 0, y / x, 0.0)

    def unmasked(x, y):
        return masked(x, y) + 0 * (y / x)

    assert texts(proof_of(masked, masked, XY)) == []
    assert texts(proof_of(masked, unmasked, XY)) == ["x != 0"]
    assert texts(proof_of(masked, lambda x, y: masked(x, y) + 0 * dist_sum(y / x), XY)) == ["x != 0"]


# ---------------------------------------------------------------------- what the sequential program hides
SQUASHES = {  # infinity to a number
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "atan": torch.atan,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    "elu": torch.nn.functional.elu,
    "softplus": torch.nn.functional.softplus,
    "logsigmoid": torch.nn.functional.logsigmoid,
    "hardtanh": torch.nn.functional.hardtanh,
    "clamp": lambda x: x.clamp(-1, 1),
    "minimum": lambda x: torch.minimum(x, torch.ones(4)),
    "maximum": lambda x: torch.maximum(x, torch.ones(4)),
    "reciprocal": torch.reciprocal,
    "rsqrt": lambda x: x.square().rsqrt(),
    "divisor": lambda x: 3 / x,
    "addcdiv": lambda x: torch.addcdiv(torch.ones(4), torch.ones(4), x),
    "negative_power": lambda x: x**-2,
}
SQUASHES_ROWS = {
    "softmax": lambda x: x.softmax(0),
    "amax": torch.amax,
    "amin": torch.amin,
    "logsumexp": lambda x: x.logsumexp(0),
}
KEEPS = {"add": lambda x: x + 1, "mul": lambda x: x * x, "matmul": lambda x: x @ x, "sin": torch.sin, "mean": torch.mean,
         "log_softmax": lambda x: x.log_softmax(0), "quotient": lambda x: x / 3, "power": lambda x: x**2}  # fmt: skip


def of_the_inverse(functions):
    """Each function of 1 / x, and the same beside what is zero wherever 1 / x is a number."""

    def sequential(x):
        return {name: function(1 / x) for name, function in functions.items()}

    def ranks(x):
        return {name: function(1 / x) + 0 * (1 / x).sum() for name, function in functions.items()}

    return sequential, ranks


@pytest.mark.parametrize("name", SQUASHES | SQUASHES_ROWS)
def test_what_makes_infinity_a_number_does_not_show_it(name):
    sequential, ranks = of_the_inverse({name: (SQUASHES | SQUASHES_ROWS)[name]})
    assert texts(proof_of(sequential, ranks, {"x": gg.Input((4,))}), name)


def test_what_keeps_infinity_shows_it():
    sequential, ranks = of_the_inverse(KEEPS)
    proof = proof_of(sequential, ranks, {"x": gg.Input((4,))})
    assert {name: texts(proof, name) for name in KEEPS} == {name: [] for name in KEEPS}


def test_a_root_is_shown_by_what_shows_nan():
    def ranks(x):
        return torch.relu(x.sqrt()) + 0 * x.sqrt()

    assert texts(proof_of(lambda x: torch.relu(x.sqrt()), ranks, {"x": gg.Input((4,))})) == []


def masked(x, y, keep):
    return torch.where(keep, y / x, y)


def quantised(x, y, keep):
    return (y / x).round().clamp(-8, 7) * x


HIDDEN = {**XY, "keep": gg.Input((4,), dtype=torch.bool)}
SAME_STEPS = {
    "mask": masked,
    "mask_in_another_shape": lambda x, y, keep: torch.where(keep[:, None], (y / x)[:, None], y[:, None]).squeeze(1),
    "fill": lambda x, y, keep: (y / x).masked_fill(keep, 0.0),
    "two_quotients": lambda x, y, keep: torch.where(keep, y / x, x / y),
    "a_quotient_of_a_quotient": lambda x, y, keep: torch.where(keep, 1 / (y / x), y),
    "quantised": quantised,
    "slice": lambda x, y, keep: (y / x)[:1] + y[:1],
    "exp_of_log": lambda x, y, keep: x.log().exp() * y,
}


@pytest.mark.parametrize("name", SAME_STEPS)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_same_steps_of_the_same_elements_are_no_matter(name, sharded):
    placed = {each: gg.Input((4,), gg.Shard(0) if sharded else gg.Replicate(), given.dtype) for each, given in HIDDEN.items()}
    program = SAME_STEPS[name]
    if not (sharded and name == "slice"):
        assert texts(proof_of(program, program, placed)) == []


def on_last_rank(number):
    return number if dist.get_rank() else 0


OTHER_STEPS = {
    "where_it_is_not_kept": (masked, lambda x, y, keep: masked(x, y, keep) + 0 * torch.where(~keep, y / x, y)),
    "a_difference_where_it_is_not_kept": (
        masked,
        lambda x, y, keep: masked(x, y, keep) + torch.where(keep, y, y / x) - torch.where(keep, y, y / x),
    ),
    "other_elements": (lambda x, y, keep: (y / x)[:2], lambda x, y, keep: (y / x)[:2] + 0 * (y / x)[2:]),
    "without_the_mask": (masked, lambda x, y, keep: masked(x, y, keep) + 0 * (y / x)),
    "other_bounds": (quantised, lambda x, y, keep: quantised(x, y, keep) + 0 * (y / x).round().clamp(-8, 8)),
    "another_fill": (masked, lambda x, y, keep: torch.where(keep, y / x, 0) + torch.where(keep, 0, y)),
    "on_one_rank": (
        masked, lambda x, y, keep: masked(x, y, keep) + 0 * torch.where(keep, y / (x + on_last_rank(1)), y)
    ),
    "a_sum_over_ranks": (masked, lambda x, y, keep: masked(x, y, keep) + 0 * dist_sum(torch.where(keep, y / x, y) - y / x)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_STEPS)
def test_other_steps_leave_a_condition(name):
    assert "x != 0" in texts(proof_of(*OTHER_STEPS[name], HIDDEN))
