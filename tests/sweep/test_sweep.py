"""`graphguard sweep`: a row for each configuration, whatever happens in it; kept, resumed, grouped."""

from __future__ import annotations

import importlib
import json
import os
import time

import pytest
from harness import command

from graphguard.sweep import run
from graphguard.sweep.ledger import Ledger, Row
from graphguard.sweep.page import law, page, table

ALL = os.environ.get("GRAPHGUARD_TEST_CASES") == "all"


def rows_of(file):
    return {(row["name"], row["ranks"]): row for row in map(json.loads, file.read_text().splitlines())}


# ---------------------------------------------------------------------- slices of libraries
def test_an_operator_is_verified_for_each_placement_and_kept(capfd, tmp_path, monkeypatch):
    file = tmp_path / "kept.jsonl"
    arguments = ("sweep", "dtensor", "--only", "relu of", "--write", str(file))
    code, printed, _ = command(capfd, *arguments)
    assert code == 0 and printed.startswith("4 configurations: 4 verified.\n\nverified\n  relu of P(sum), tp 2 (")
    assert [row["verdict"] for row in rows_of(file).values()] == ["verified"] * 4
    assert file.with_suffix(".md").read_text().startswith("## torch 2.")

    def again(*_):
        raise AssertionError("what is kept is not run again")

    monkeypatch.setattr(run, "apart", again)
    assert command(capfd, *arguments)[:2] == (0, printed)


def test_what_raises_on_the_ranks_alone_is_told_apart(capfd, tmp_path):
    file = tmp_path / "kept.jsonl"
    code, printed, _ = command(capfd, "sweep", "dtensor", "--only", "group_norm of S(0)", "--write", str(file))
    (row,) = rows_of(file).values()
    assert code == 2 and row["verdict"] == "raises" and "1 raises." in printed
    assert "native_group_norm_backward.default does not have a sharding strategy registered" in row["reason"]


@pytest.mark.skipif(not ALL, reason="make test-all runs it: every family is imported for its plan")
def test_a_plan_that_leaves_a_gradient_unsummed_is_found(capfd, tmp_path):
    pytest.importorskip("transformers")
    file = tmp_path / "kept.jsonl"
    code, printed, _ = command(capfd, "sweep", "transformers", "--only", "apertus:", "--write", str(file))
    assert code == 1 and "refuted: Replicate is expected: the sum over axis tp is missing" in printed
    assert rows_of(file)["apertus: ApertusConfig", "tp 2"]["reason"].startswith(
        "grads.model.layers.0.mlp.act_fn.alpha_n = sum("
    )


def test_a_loss_that_shrinks_with_the_ranks_is_found_and_its_twin_verified(capfd, tmp_path):
    pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    file = tmp_path / "kept.jsonl"
    code, _, _ = command(capfd, "sweep", "megatron", "--only", "router, z loss", "--write", str(file))
    per_token, mean = "router, z loss, loss per token", "router, z loss"
    verdicts = {key: row["verdict"] for key, row in rows_of(file).items()}
    assert code == 1 and verdicts.pop((per_token, "tp 2")) == "refuted"
    assert verdicts == {(mean, "tp 2"): "verified", (mean, "dp 2"): "verified", (per_token, "dp 2"): "verified"}
    assert rows_of(file)[per_token, "tp 2"]["reason"].startswith(
        "grads.module.router.weight: it is 1/2 times what it should be"
    )


def test_every_configuration_with_a_plan_is_listed_once_and_options_are_added():
    pytest.importorskip("transformers")
    from graphguard.sweep.families import candidates

    plain = [(each.name, each.ranks) for each in candidates((2, 4), False)]
    with_options = [each.name for each in candidates((2,), True)]
    assert len(set(plain)) == len(plain) > 200 and ("llama: LlamaConfig", "tp 4") in plain
    assert {"phi: PhiConfig, qk_layernorm", "glm4_moe: Glm4MoeConfig, use_qk_norm"} <= set(with_options)


# Sizes must fit to each other: heads of state, parts of rotary positions, kinds of layers, what is asked for and not there.
SMALL = {
    "granitemoehybrid": "GraniteMoeHybridConfig", "glm4v_moe": "Glm4vMoeTextConfig", "olmo_hybrid": "OlmoHybridConfig",
    "lfm2_moe": "Lfm2MoeConfig", "mistral4": "Mistral4Config", "gemma3n": "Gemma3nTextConfig",
    "qwen3_omni_moe": "Qwen3OmniMoeTalkerTextConfig",
}  # fmt: skip


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", SMALL if ALL else ["granitemoehybrid", "glm4v_moe", "lfm2_moe"])
def test_a_small_configuration_is_one_that_runs(family, tp):
    pytest.importorskip("transformers")
    from graphguard.sweep.small import first_that_runs, model_of

    config = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), SMALL[family])
    made, choice = first_that_runs(config, tp, {})
    assert made.num_attention_heads % tp == 0 and choice.keys >= tp and made.vocab_size == 32
    assert sum(parameter.numel() for parameter in model_of(config)(made).parameters()) < 200_000


def test_a_family_without_a_model_of_its_configuration_says_so():
    pytest.importorskip("transformers")
    from transformers.models.t5gemma.configuration_t5gemma import T5GemmaModuleConfig

    from graphguard.sweep.small import first_that_runs

    with pytest.raises(LookupError, match="modeling_t5gemma has no model of T5GemmaModuleConfig alone"):
        first_that_runs(T5GemmaModuleConfig, 2, {})


TRAINING = [
    ("deepspeed", "ZeRO 1, plain"),
    ("accelerate", "Accelerator, 2 microbatches, clipped"),
    ("torchtitan", "llama3: debugmodel"),
]


@pytest.mark.parametrize(("library", "only"), TRAINING)
def test_a_step_of_a_library_is_verified(capfd, tmp_path, library, only):
    pytest.importorskip(library)
    file = tmp_path / "kept.jsonl"
    command(capfd, "sweep", library, "--only", only, "--write", str(file))
    verdicts = [row["verdict"] for (name, _), row in rows_of(file).items() if name == only]
    assert verdicts and set(verdicts) == {"verified"}


def test_a_step_that_is_not_what_one_process_does_is_refuted():
    from graphguard.sweep.training import Plan, alone, verify_training

    assert verify_training(Plan(2), alone, 2).verdict == "refuted"  # nobody averages the gradients


# ---------------------------------------------------------------------- whatever happens
def fails():
    raise ValueError("two\nlines")


def hangs():
    time.sleep(60)


@pytest.mark.parametrize(
    ("verify", "reason"),
    [
        (fails, "two lines"),
        (lambda: os._exit(3), "the process ended with exit code 3"),
        (hangs, "no answer within 0.5 seconds"),
    ],
)
def test_a_configuration_that_cannot_run_is_a_row(verify, reason):
    assert run.apart(lambda: run.said(verify), 0.5) == ("error", reason, "")


def row(name, verdict, reason="", where="", seconds=1.0):
    return Row("lib 1.0", "2.13.0", "0.1", name, "tp 2", verdict, reason, where, seconds, "2026-01-02")


def test_rows_are_grouped_by_verdict_and_reason():
    missing = "{0} = sum(rank0.{0}, rank1.{0}), but Replicate is expected: the sum is missing"
    rows = [
        row("c", "verified"), row("b", "refuted", missing.format("grads.q"), "m.py:3"),
        row("a", "refuted", missing.format("grads.k")),
    ]  # fmt: skip
    assert table(rows) == (
        "3 configurations: 2 refuted, 1 verified.\n\nrefuted: Replicate is expected: the sum is missing\n"
        "  a, tp 2 (1.0 s)\n  b, tp 2 (1.0 s)  m.py:3\n\nverified\n  c, tp 2 (1.0 s)\n"
    )
    written = page(rows)
    assert "## lib 1.0, torch 2.13.0, GraphGuard 0.1\n" in written and "Run on 2026-01-02." in written
    assert "| refuted | 2 | Replicate is expected: the sum is missing<br>`m.py:3` | a (tp 2)<br>b (tp 2) |\n" in written


def test_a_reason_has_no_names_of_outputs():
    assert law("grads.a.weight: it is 2 times grads.b") == "it is 2 times a gradient"
    assert law("rank 0 raised ValueError: grads are none") == "rank 0 raised ValueError: grads are none"


def test_a_file_that_is_no_ledger_is_refused(capfd, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text('{"name": 1}\n')
    code, _, said = command(capfd, "sweep", "dtensor", "--only", "relu of R", "--write", str(file))
    assert code == 2 and "other.jsonl:1 is no row of a sweep; name another file, or remove the line" in said


def test_a_ledger_knows_versions_apart(tmp_path):
    ledger = Ledger(tmp_path / "kept.jsonl")
    ledger.add(row("a", "verified"))
    assert Ledger(ledger.file).rows.keys() == {("lib 1.0", "2.13.0", "0.1", "a", "tp 2")}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("jax",), "there is no sweep of 'jax'; there are: transformers, megatron, torchtitan, deepspeed, accelerate, dtensor"),
        (("dtensor", "--tp", "two"), "--tp 'two' is no list of numbers of ranks from 2 on, such as 2,4"),
        (("dtensor", "--tp", "1"), "--tp '1' is no list of numbers of ranks"),
        (("dtensor", "--only", "nothing like it"), "has 'nothing like it' in its name"),
    ],
)
def test_what_is_asked_for_must_be_there(capfd, arguments, words):
    code, _, said = command(capfd, "sweep", *arguments)
    assert code == 2 and words in said
