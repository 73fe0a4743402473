"""Libraries as they are shipped: what they distribute is proved, and a fault that is put in is refuted and located."""

import os
import re
from functools import cache
from pathlib import Path

import pytest
from harness import ROOT

from graphguard.checks.discovery import find_checks

FOLDER = ROOT / "examples" / "libraries"
NEEDS = {
    "transformers_tp": "transformers", "transformers_experts": "transformers", "transformers_full_size": "transformers",
    "torchtitan_llama": "torchtitan",
    "megatron_gpt": "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_distributed": "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_pipeline": "megatron.core.models.gpt.gpt_layer_specs",
    "megatron_experts": "megatron.core.models.gpt.gpt_layer_specs",
    "accelerate_data_parallel": "accelerate", "deepspeed_data_parallel": "deepspeed",
    "deepspeed_zero": "deepspeed",
}  # fmt: skip
CHECKS = {
    f"{file.stem}::{name}": given
    for file in sorted(FOLDER.glob("*.py"))
    for given, name in re.findall(r"@gg\.check([^\n]*)\ndef (\w+)", file.read_text())
}
# One check of each kind: the others differ from these in the plan or the mesh only, and `graphguard verify` runs them all.
PROVED = [
    "torch_tensor_parallel::with_loss_parallel",
    "torch_data_parallel::data_parallel",
    "torch_fully_shard::over_tensor_parallelism",
    "torch_pipelining::interleaved",
    "torch_context_parallel::ring",
    "torch_zero::adam",
    "transformers_tp::llama",
    "transformers_tp::llama_batch_of_one",
    "transformers_tp::mixtral",
    "megatron_gpt::gated_transformer_layer",
    "megatron_gpt::gpt_with_sequence_parallelism",
    "megatron_experts::experts_on_two_ranks",
    "megatron_experts::dropless_by_all_to_all",
    "transformers_experts::qwen3_moe_in_groups",
    "torchtitan_llama::tensor_and_sequence_parallel",
    "accelerate_data_parallel::prepared_model",
    "deepspeed_zero::stage_3",
]
if os.environ.get("GRAPHGUARD_TEST_CASES") == "all":
    PROVED = [name for name, given in CHECKS.items() if not given]
FORWARD_ONLY = {
    "megatron_experts::output_of_the_layer", "transformers_experts::qwen3_moe_in_groups",
    "transformers_experts::qwen3_moe_in_a_loop", "transformers_experts::mixtral_in_groups",
}  # fmt: skip
# By fault: the kind of the first finding that locates it, the file and the words of the line.
LOCATED = {
    "torch_tensor_parallel::row_parallel_without_a_reduction": (
        "unexplained-output", "torch_tensor_parallel.py", "x = x + self.mlp(self.norm2(x))",
    ),
    "torch_fully_shard::gradients_are_summed": (
        "unexplained-output", "torch_tensor_parallel.py", "x = x + self.mlp(self.norm2(x))",
    ),
    "torch_pipelining::gradients_of_microbatches_are_added_unscaled": (
        "unexplained-output", "torch_pipelining.py", "run.step(",
    ),
    "transformers_tp::qwen3_without_a_gradient_sum": (
        "unexpected-relation", "modeling_qwen3.py", "self.weight * hidden_states",
    ),
    "torch_zero::weights_decay_on_the_ranks_alone": ("unexplained-output", "torch_zero.py", "optimizer.step()"),
    "transformers_tp::llama_with_a_loss_divided_by_the_ranks": (
        "scaled-copies", "transformers_tp.py", "whole / dist.get_world_size()",
    ),
    "megatron_gpt::norm_gradients_are_not_summed": ("unexpected-relation", "fused_bias_dropout.py", "x = x + bias"),
}  # fmt: skip

if os.environ.get("GRAPHGUARD_TEST_CASES") == "all":
    LOCATED |= {
        "transformers_tp::llama_without_a_reduction": (
            "unexplained-output", "tensor_parallel.py", "output = original_forward(*args, **kwargs)",
        ),
        "transformers_tp::mixtral_without_a_reduction": (
            "unexplained-output", "tensor_parallel.py", "self.transform_output_post_forward(module, output, mesh)",
        ),
        "torch_tensor_parallel::norm_that_is_not_in_the_plan": (
            "unexpected-relation", "torch_tensor_parallel.py", "x = x + self.mlp(self.norm2(x))",
        ),
        "torch_data_parallel::gradients_are_not_synchronised": (
            "unexplained-output", "torch_tensor_parallel.py", "self.head(self.norm3(x))",
        ),
        "torch_data_parallel::loss_is_divided_twice": (
            "unexpected-relation", "torch_data_parallel.py", 'reduction="sum") / (2 *',
        ),
        "torch_zero::loss_is_scaled_on_the_ranks": (
            "unexplained-output", "torch_zero.py", "loss = loss * scale",
        ),
        "torch_zero::gradients_are_not_synchronised": (
            "unexplained-output", "torch_zero.py", "self.down(torch.tanh(self.up(x)))",
        ),
        "accelerate_data_parallel::model_is_not_prepared": (
            "unexplained-output", "accelerate_data_parallel.py", "self.down(torch.tanh(self.up(x)))",
        ),
        "accelerate_data_parallel::loss_is_divided_for_steps_that_are_not_taken": (
            "scaled-copies", "accelerator.py", "loss / self.gradient_accumulation_steps",
        ),
        "deepspeed_data_parallel::gradients_are_not_synchronised": (
            "unexplained-output", "deepspeed_data_parallel.py", "(model if synchronised else model.optimizer).step()",
        ),
        "deepspeed_data_parallel::gradients_are_clipped": (
            "unexplained-output", "utils.py", "param_norm = p.grad.data.detach().float().norm(norm_type)",
        ),
        "deepspeed_data_parallel::loss_is_divided_by_the_ranks": (
            "unexpected-relation", "deepspeed_data_parallel.py", "/ dist.get_world_size()",
        ),
        "deepspeed_zero::loss_is_divided_by_the_ranks": (
            "unexpected-relation", "deepspeed_zero.py", "/ dist.get_world_size()",
        ),
        "deepspeed_zero::weights_decay_on_the_ranks_alone": (
            "unexplained-output", "stage_1_and_2.py", "self.optimizer.step()",
        ),
        "deepspeed_zero::gradients_are_clipped": (
            "unexplained-output", "stage3.py", ".norm(norm_type))",
        ),
        "megatron_gpt::row_parallel_without_a_reduction": (
            "relation-lost", "layers.py", "torch.matmul(total_input, weight.t())",
        ),
        "megatron_gpt::loss_is_divided_by_the_ranks": (
            "scaled-copies", "megatron_gpt.py", "/ parallel_state.get_tensor_model_parallel_world_size()",
        ),
        "megatron_distributed::gradients_are_not_finalized": (
            "unexplained-output", "megatron_distributed.py", "p.main_grad",
        ),
        "megatron_distributed::loss_is_divided_by_the_replicas": (
            "unexpected-relation", "megatron_distributed.py", "mean / parallel_state.get_data_parallel_world_size()",
        ),
        "megatron_distributed::row_parallel_without_a_reduction": (
            "relation-lost", "layers.py", "torch.matmul(total_input, weight.t())",
        ),
        "megatron_pipeline::one_microbatch_is_left_out": (
            "unexplained-output", "megatron_pipeline.py", "return stage(ids, positions, mask, labels=ids)",
        ),
        "megatron_experts::results_are_not_sent_back": (
            "unexplained-output", "moe_utils.py", "output_tokens.scatter_add_(",
        ),
        "megatron_experts::loss_is_divided_by_the_ranks": (
            "unexpected-relation", "megatron_experts.py", "loss / parallel_state.get_data_parallel_world_size()",
        ),
        "megatron_experts::experts_are_not_weighed": (
            "unexplained-output", "layers.py", "torch.matmul(total_input, weight.t())",
        ),
        "torchtitan_llama::loss_is_the_mean_of_each_rank": (
            "unexplained-output", "torchtitan_llama.py", "F.cross_entropy(model(ids)",
        ),
        "torchtitan_llama::row_parallel_without_a_reduction": (
            "unexplained-output", "model.py", "self.feed_forward(self.ffn_norm(h))",
        ),
        "torch_data_parallel::one_parameter_is_left_out": (
            "unexplained-output", "torch_tensor_parallel.py", "self.down(F.silu(self.gate(x)) * self.up(x))",
        ),
        "torch_tensor_parallel::loss_is_divided_by_the_ranks": (
            "scaled-copies", "torch_tensor_parallel.py", "loss(model, ids, labels) / (dist.get_world_size()",
        ),
        "torch_fully_shard::loss_is_divided_twice": (
            "unexpected-relation", "torch_fully_shard.py", "/ (2 * BATCH * SEQUENCE)",
        ),
        "torch_pipelining::loss_is_divided_by_the_microbatches": (
            "unexplained-output", "torch_pipelining.py", "loss_fn(y, target) / MICROBATCHES",
        ),
        "torch_pipelining::targets_of_other_microbatches": ("unexplained-output", "torch_pipelining.py", "run.step("),
        "torch_context_parallel::loss_is_divided_by_all_tokens": (
            "unexpected-relation", "torch_context_parallel.py", "/ (BATCH * SEQUENCE)",
        ),
        "megatron_pipeline::loss_is_divided_by_the_microbatches": (
            "unexplained-output", "schedules.py", "output_tensor /= num_microbatches",
        ),
        "accelerate_data_parallel::last_microbatch_is_not_synchronised": (
            "unexplained-output", "accelerate_data_parallel.py", "self.down(torch.tanh(self.up(x)))",
        ),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # as when the file is run: one imports another


@cache
def report_of(name):
    file, check = name.split("::")
    if file in NEEDS:
        pytest.importorskip(NEEDS[file])
    (found,) = find_checks(f"{FOLDER / file}.py::{check}")
    return found.function()


@pytest.mark.parametrize("name", PROVED)
def test_a_library_is_proved_with_the_loss_and_every_gradient_or_parameter(name):
    report = report_of(name)
    assert report.verdict == "verified", report
    result = "y" if name.startswith("transformers_experts") else "loss"  # of a layer alone
    trained = result in report.relation and any(path.startswith(("grads.", "after.")) for path in report.relation)
    assert trained == (name not in FORWARD_ONLY)


# Refuted, while the report names other lines.
NOT_NAMED = {"transformers_tp::mixtral_without_a_reduction", "megatron_distributed::row_parallel_without_a_reduction"}


@pytest.mark.parametrize("name", LOCATED)
def test_a_seeded_fault_is_refuted_and_located(name):
    kind, file, words = LOCATED[name]
    report = report_of(name)
    assert report.verdict == "refuted" and report.counterexample is not None
    finding = report.findings[0]
    assert finding.kind == kind, finding
    named = [(Path(line.file).name, Path(line.file).read_text().splitlines()[line.line - 1]) for line in finding.lines]
    assert any(where == file and words in text for where, text in named) == (name not in NOT_NAMED), named


def test_the_relation_of_every_parameter_is_found_as_the_library_marks_it():
    found = report_of("megatron_gpt::gated_transformer_layer").parameters
    assert found["decoder.layers.0.mlp.linear_fc1.weight"] == "_StridedShard(dim=0, sf=2), by its tensor_model_parallel mark"
    assert found["decoder.layers.0.mlp.linear_fc2.weight"] == "Shard(1) on tp, by its tensor_model_parallel mark"
    found = report_of("transformers_tp::llama").parameters
    assert found["model.layers.0.self_attn.q_proj.weight"] == "Shard(0) on tp, by its DTensor placements"
    assert found["model.norm.weight"] == "Replicate, as its shape is the sequential one's"


def test_the_table_has_every_check_and_what_is_named_here_exists():
    table = (FOLDER / "README.md").read_text()
    assert [name for name in CHECKS if f"`{name.split('::')[1]}`" not in table] == []
    assert CHECKS.keys() >= {*PROVED, *LOCATED, *FORWARD_ONLY} and {name.split("::")[0] for name in CHECKS} >= NEEDS.keys()
