"""Faults that were found in shipped libraries: they are refuted and named, repairs are verified, and real gloo ranks agree."""

from __future__ import annotations

import ast
import importlib
import os
from pathlib import Path

import pytest

import graphguard as gg
from graphguard.checks.discovery import find_checks
from graphguard.gallery import found
from graphguard.gallery.rows import row_of

FILES = [file.stem for file in found.files()]
# Of each library one that is quick, and what `make test` leaves out.
RUN = ["megatron_z_loss_per_token", "megatron_reduce_of_a_copy", "torch_loss_parallel", "transformers_apertus"]
if os.environ.get("GRAPHGUARD_TEST_CASES") == "all":
    RUN = FILES
ROUTER = "grads.module.router.weight"
# By file: the output that the first finding is about, its words, and the file and words of a line that it names.
NAMED = {
    "megatron_aux_loss_per_token": (ROUTER, "1/2 times what it should be", "router.py", "aux_loss * num_tokens"),
    "megatron_z_loss_per_token": (ROUTER, "1/2 times what it should be", "router.py", "z_loss * num_tokens"),
    "megatron_seq_aux_loss_per_token": (ROUTER, "multiplied once too often", "moe_utils.py", "tokens_per_expert) * ("),
    "megatron_global_aux_loss": (ROUTER, "1/2 times what it should be", "moe_utils.py", "aux_loss_backward_scale"),
    "megatron_context_loss": (
        "grads.module.linear.weight", "sum over cp before it", "schedules.py", "torch.clamp(num_tokens, min=1)",
    ),
    "megatron_mla_query_norm": (
        "grads.module.attention.q_layernorm.weight", "counted 2 times over axis tp", "small_mla.py", "build(Attention, tp=2",
    ),
    "megatron_mla_shared_key": (
        "grads.module.attention.linear_kv_down_proj.weight", "a summand over tp, which is not summed before",
        "multi_latent_attention.py", "kv_compressed, k_pos_emb = torch.split(",
    ),
    "megatron_reduce_of_a_copy": (
        "grad", "the sum over axis tp is missing", "megatron_reduce_of_a_copy.py", "copy_to_tensor_model_parallel_region(y",
    ),
    "megatron_sinks_in_the_norm": (
        "squared_norm", "where the sequential program has", "megatron_sinks_in_the_norm.py",
        "get_main_grads_for_grad_norm(optimizer)",
    ),
    "torch_loss_parallel": ("grad", "it is not what the sequential program has", "torch_loss_parallel.py", "distillation(*("),
    "transformers_accumulation": (
        "grads.layers.0.self_attn.k_norm.weight", "not what the sequential program has", "tensor_parallel.py",
        "dist.all_reduce(param.grad",
    ),
    "transformers_apertus": (
        "grads.model.layers.0.mlp.act_fn.alpha_n", "the sum over axis tp is missing", "tensor_parallel.py",
        "output.redistribute(",
    ),
    "transformers_glm4_moe": (
        "grads.model.layers.0.self_attn.k_norm.weight", "the sum over axis tp is missing", "modeling_glm4_moe.py",
        "self.weight * hidden_states",
    ),
    "transformers_phi": (
        "grads.model.layers.0.self_attn.k_layernorm.weight", "the sum over axis tp is missing", "modeling_phi.py",
        "self.k_layernorm(key_states)",
    ),
    "transformers_qwen3_omni_moe": (
        "grads.layers.0.self_attn.k_norm.weight", "the sum over axis tp is missing", "modeling_qwen3_omni_moe.py",
        "self.weight * hidden_states",
    ),
    "transformers_qwen3_vl_moe": (
        "grads.layers.0.self_attn.k_norm.weight", "the sum over axis tp is missing", "modeling_qwen3_vl_moe.py",
        "self.weight * hidden_states",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    needed = {"transformers": "transformers", "megatron": "megatron.core.models.gpt.gpt_layer_specs"}
    for stem in RUN:
        if stem.split("_")[0] in needed:
            pytest.importorskip(needed[stem.split("_")[0]])
    monkeypatch.syspath_prepend(found.FOLDER)  # as when the file is run: one imports another


@pytest.mark.parametrize("stem", RUN)
def test_what_is_shipped_is_refuted_and_named_and_the_repair_verified(stem):
    checks = {check.name: check for check in find_checks(str(found.FOLDER / f"{stem}.py"))}
    rows = {name: row_of(check.outcome()) for name, check in checks.items()}
    assert {name: row.verdict for name, row in rows.items()} == {"shipped": "refuted", "repaired": "verified"}
    path, words, file, text = NAMED[stem]
    assert path in rows["shipped"].found and words in rows["shipped"].found
    named = [(Path(where).name, Path(where).read_text().splitlines()[line - 1]) for where, line in rows["shipped"].named]
    assert any(where == file and text in source for where, source in named), named
    line = line_of_page(stem)
    assert line.endswith("| verified |") and found._cell(rows["shipped"].found) in line


@pytest.mark.gloo
@pytest.mark.parametrize("stem", RUN)
def test_real_ranks_have_the_fault_and_not_with_the_repair(stem, monkeypatch):
    for verify in ("verify", "verify_model"):
        monkeypatch.setattr(gg, verify, lambda **given: given)  # the programs of the check, in the place of its report
    module, real_ranks = importlib.import_module(stem), importlib.import_module("real_ranks")
    wrong, right = ([*real_ranks.differences(**check())] for check in (module.shipped, module.repaired))
    assert right == [] and NAMED[stem][0] in [difference.path for difference in wrong]
    assert f"{wrong[0].path}[" in line_of_page(stem)


def line_of_page(stem):
    (line,) = (line for line in found.PAGE.read_text().splitlines() if f"(../examples/found/{stem}.py)" in line)
    return line


def test_the_page_has_every_file_and_every_file_says_its_version_and_what_it_means():
    assert set(FILES) == NAMED.keys() and set(RUN) <= set(FILES)
    for stem in FILES:
        library, what, text = found.described(stem)
        assert line_of_page(stem).startswith(f"| {library} | [{found._cell(what)}]")
        assert "In training: " in text and ("#" in text or "No public report is known to us" in " ".join(text.split()))
        body = ast.parse((found.FOLDER / f"{stem}.py").read_text()).body
        assert [node.name for node in body if isinstance(node, ast.FunctionDef)][-2:] == ["shipped", "repaired"]
    page = found.PAGE.read_text()
    assert page.startswith(found.HEAD) and page.endswith(found.NOT_SHOWN.read_text())
    assert f"\n{len(FILES)} silent faults; {len(FILES)} repairs are verified.\n" in page


def test_numbers_of_public_reports_are_read_from_docstrings():
    assert found.public("Reported as a/b #1; a repair is in #2, and c/d #3.") == [("a/b", "1"), ("a/b", "2"), ("c/d", "3")]
    assert found.public("No public report is known to us.") == []


@pytest.mark.gloo
def test_a_rank_that_raises_is_told_and_one_that_only_has_a_part_is_no_difference():
    real_ranks = importlib.import_module("real_ranks")

    def shifted(x, mesh):
        return x + mesh.get_rank()

    given = {"mesh": {"tp": 2}, "inputs": {"x": gg.Input((4,))}}
    (difference,) = real_ranks.differences(lambda x: x, shifted, **given)
    assert difference.path == "out" and difference.got[0] == difference.expected != difference.got[1]
    with pytest.raises(RuntimeError, match="rank 0 of 2 raised"):
        real_ranks.differences(lambda x: x, lambda x: x.no_such_name, **given)


def test_no_two_folders_of_examples_have_files_of_one_name():
    """Files import each other by name: two folders with one name would be mixed up."""
    others = {file.stem for folder in ("libraries", "bugs", "") for file in (found.GALLERY / folder).glob("*.py")}
    assert others.isdisjoint(file.stem for file in found.FOLDER.glob("*.py"))
