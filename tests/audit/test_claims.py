"""Every claim about every tensor is compared with a run; a wrong one is found."""

from fractions import Fraction

import numpy as np
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard.audit.claims import audit_claims, check_claims
from graphguard.engine.numeric.evaluator import Evaluator
from graphguard.engine.prove import interpret
from graphguard.engine.terms.term import Value
from graphguard.engine.terms.unknown import Unknown
from graphguard.lemmas.known import all_lemmas


def mlp(x, a, b):
    return torch.relu(x @ a) @ b


def split_mlp(x, a, b):
    y = torch.relu(x @ a) @ b
    dist.all_reduce(y)
    return y


INPUTS = {
    "x": gg.Input((4, 6)),
    "a": gg.Input((6, 8), gg.Shard(1)),
    "b": gg.Input((8, 6), gg.Shard(0)),
}


def described(sequential=mlp, distributed=split_mlp, inputs=INPUTS, ranks=2):
    captured = gg.capture_function(sequential, distributed, mesh={"tp": ranks}, inputs=inputs)
    return captured, interpret(captured.sequential, captured.world(), {}, all_lemmas())


def audited(captured, found, **options):
    return audit_claims(found, captured.sequential, captured.joint, captured.relations, **options)


def test_right_claims_stand_for_all_tensors():
    captured, found = described()
    audit = audited(captured, found)
    tensors = sum(len(list(graph.values())) for graph in [captured.sequential, *captured.ranks])
    assert audit.wrong == [] and audit.compared == tensors and not audit.skipped and not audit.undescribed


def test_check_claims_takes_inputs():
    captured, found = described()
    given = {"x": torch.ones(4, 6)}
    assert check_claims(found, captured.sequential, captured.joint, captured.relations, given) == []


def changed(found, stream, change):
    """The interpretation with one term of the last tensor of the ranks changed."""
    _, environment = found.streams[stream]
    tensor = list(environment)[-1]
    value = environment[tensor]
    environment[tensor] = Value(value.shape, (change(value.terms[0]), *value.terms[1:]))
    return tensor


def test_a_wrong_coefficient_is_found_on_every_rank():
    captured, found = described()
    changed(found, 0, lambda term: term.with_(coefficient=term.coefficient * 2))
    wrong = audited(captured, found).wrong
    assert [w.rank for w in wrong] == [0, 1]
    assert all(w.node is not None and w.node.op == "dist.all_reduce" and w.difference > 1e-3 for w in wrong)
    assert "is described as" in str(wrong[0]) and str(wrong[0]).startswith("rank 0: ")


def test_a_claim_that_is_wrong_in_one_lane_is_found_there():
    captured, found = described()
    changed(found, 0, lambda term: term.with_(weight=np.array([1, 2])))
    assert [w.rank for w in audited(captured, found).wrong] == [1]


def test_a_box_outside_of_the_tensor_is_wrong_not_wrapped_around():
    captured, found = described()
    changed(found, 0, lambda term: term.with_(box=((-4, 0), *term.box[1:])))
    assert all("malformed" in w.reason for w in audited(captured, found).wrong)
    assert len(audited(captured, found).wrong) == 2


def test_a_wrong_claim_about_the_sequential_program_is_found():
    captured, found = described()
    tensor = captured.sequential.nodes[0].outputs[0]
    found.sequential[tensor] = found.sequential[captured.sequential.inputs["a"]]
    assert [w.rank for w in audited(captured, found).wrong] == [None]


def test_what_is_not_described_is_counted():
    captured, found = described()
    found.sequential[captured.sequential.nodes[0].outputs[0]] = Unknown("for the test", None)
    assert audited(captured, found).undescribed == 1


def test_parts_of_an_input_are_learned_and_their_sum_is_the_input():
    def gathered(x):
        dist.all_reduce(x)
        return x * 2

    captured, found = described(lambda x: x * 2, gathered, {"x": gg.Input((4, 6), gg.Partial())}, 3)
    audit = audited(captured, found)
    assert audit.wrong == [] and audit.compared and not audit.skipped


def test_an_operator_without_a_lemma_is_learned_from_its_first_result():
    def sequential(x):
        return torch.linalg.cholesky(x @ x.T + torch.eye(4)) * 3

    captured, found = described(sequential, sequential, {"x": gg.Input((4, 4))}, 2)
    audit = audited(captured, found)
    assert audit.wrong == []
    for _, environment in found.streams:
        last = list(environment)[-1]
        environment[last] = Value(
            environment[last].shape, tuple(t.with_(coefficient=Fraction(2)) for t in environment[last].terms)
        )
    assert audited(captured, found).wrong


def test_memory_that_nothing_was_written_to_is_skipped():
    def wasteful(x):
        return torch.empty(4, 6) * 0 + x, x

    captured, found = described(lambda x: (x, x), wasteful, {"x": gg.Input((4, 6))}, 2)
    assert audited(captured, found).skipped.get("Unlearned unwritten")


def test_whole_numbers_are_drawn_from_the_range_that_the_engine_assumes():
    def lookup(ids, table):
        return torch.nn.functional.embedding(ids, table)

    inputs = {"ids": gg.Input((5,), dtype=torch.int64), "table": gg.Input((7, 3))}
    captured, found = described(lookup, lookup, inputs, 2)
    assert [text for each in found.table.facts.ranges().values() for text in each.in_words("ids", (5,))] == ["0 <= ids < 7"]
    audit = audited(captured, found)
    assert audit.wrong == [] and audit.compared


def test_complex_tensors_are_described_as_pairs():
    def turned(x, a):
        z = torch.view_as_complex(x.reshape(4, 3, 2)) * torch.polar(torch.ones(4, 3), a)
        return torch.view_as_real(z)

    captured, found = described(turned, turned, {"x": gg.Input((4, 6)), "a": gg.Input((4, 3))}, 2)
    audit = audited(captured, found)
    assert audit.wrong == [] and audit.compared


def test_infinities_equal_themselves():
    def masked(x):
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return torch.softmax(x.masked_fill(~mask, float("-inf")), -1)

    captured, found = described(masked, masked, {"x": gg.Input((4, 4))}, 2)
    audit = audited(captured, found)
    assert audit.wrong == [] and audit.compared


def test_the_evaluator_agrees_with_itself_in_whatever_order_it_is_asked():
    """What is remembered of atoms is what they are: a fresh evaluator says the same."""
    _, found = described(ranks=4)
    arrays = {name: np.random.default_rng(1).normal(size=spec.shape) for name, spec in INPUTS.items()}
    ((stream, environment),) = found.streams
    shared = Evaluator(found.table, arrays)
    for lane in reversed(range(stream.lanes)):
        for value in reversed(list(environment.values())):
            np.testing.assert_allclose(shared.value(value, lane), Evaluator(found.table, arrays).value(value, lane), atol=1e-12)
