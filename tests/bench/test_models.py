"""The models of the benchmarks, narrow enough to be executed: what is measured at full size is right, its faults are faults."""

from __future__ import annotations

import json
import math

import pytest

import graphguard as gg
from graphguard.bench import end_to_end, page
from graphguard.bench.end_to_end import measured
from graphguard.bench.faulty import FAULTS, Faulty
from graphguard.bench.models.megatron import Megatron
from graphguard.bench.models.of_transformers import TransformersLlama
from graphguard.bench.models.sizes import MODELS, small
from graphguard.bench.results import Row, keep, kept, printed
from graphguard.errors import InternalError

LLAMA = small(MODELS["Llama-3 8B"], layers=2, split=2)


def verified(model):
    inputs = {"inputs": model.inputs(), "local_inputs": model.local_inputs}
    return gg.verify(model.sequential, model.distributed, mesh=model.mesh, outputs=model.expected(), **inputs)


@pytest.mark.parametrize("name", ["Llama-3 8B", "GPT-3 175B", "Qwen2-72B", "DeepSeek-V3-like 671B"])
def test_every_form_is_verified_and_executed(name):
    report = verified(Megatron(small(MODELS[name], layers=2, split=2), tp=2, dp=2, pp=2, microbatches=2))
    assert report.verified and report.stats["oracle"]["skipped"] is None


@pytest.mark.parametrize("name", ["Llama-3 8B", "DeepSeek-V3-like 671B"])
def test_context_parallelism_is_verified_and_executed(name):
    report = verified(Megatron(small(MODELS[name], layers=2, split=4), tp=2, cp=2, dp=2 if "V3" in name else 1))
    assert report.verified and report.stats["oracle"]["skipped"] is None


def test_the_model_of_transformers_is_verified():
    pytest.importorskip("transformers")
    row = measured("end-to-end", "Llama-3 8B of transformers", TransformersLlama(LLAMA, tp=2))
    assert (row.verdict, row.ranks, row.layers) == ("verified", 2, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refuted(fault):
    report = verified(Faulty(LLAMA, tp=2, dp=2, pp=2, microbatches=2, fault=fault))
    assert report.verdict == "refuted"


def test_layers_are_dealt_to_stages_as_llama_3_deals_them():
    """126 layers on 16 stages: one less on the first and on the last."""
    ends = Megatron(MODELS["Llama-3 405B"], pp=16)._ends()
    assert [b - a for a, b in zip([0, *ends], ends, strict=False)] == [7, *[8] * 14, 7]


def test_sizes_are_the_published_ones():
    """Parameters, to a few percent; experts' routers and norms count."""
    billions = {"GPT-3 175B": 175, "Llama-3 8B": 8, "Llama-3 70B": 70.6, "Llama-3 405B": 405.9, "Qwen2-72B": 72.7,
                "DeepSeek-V3-like 671B": 671}  # fmt: skip
    for name, wanted in billions.items():
        count = sum(math.prod(each.shape) for each in Megatron(MODELS[name]).held().values())
        assert count / 1e9 == pytest.approx(wanted, rel=0.02), name


def test_a_measurement_is_kept_and_printed(tmp_path):
    row = measured("end-to-end", "Llama-3 8B", Megatron(LLAMA, tp=2))
    assert (row.verdict, row.ranks, row.mesh) == ("verified", 2, "TP 2") and row.operations > 100 and row.processor > 0
    file = tmp_path / "results.json"
    keep(file, [row])
    keep(file, [row])
    assert kept(file) == [row] and json.loads(file.read_text())["machine"]["cores"]
    assert printed([row]).row_count == 1


def test_the_page_has_plots_with_fitted_exponents(tmp_path):
    numbers = {"classes": 1, "capture": 1.0, "proof": 1.0, "total": 1.0, "peak_bytes": 1 << 30, "microbatches": 1}
    rows = [Row(suite="scaling", model="Llama-3 405B", layers=16, tp=tp, dp=1, pp=1, fault=None, verdict="verified", ranks=tp,
                operations=100 * tp, processor=tp**2, **numbers) for tp in (2, 4, 8)]  # fmt: skip
    file = tmp_path / "benchmarks.json"
    keep(file, rows)
    page.write(file)
    text = file.with_suffix(".md").read_text()
    assert "Against ranks of tensor parallelism: time grows with the power 2.00." in text
    assert "| Llama-3 405B | 16 | TP 8 | 8 | 1 | 800 |  | verified |" in text and "TrainVerify" in text
    assert (tmp_path / "benchmarks-tensor.svg").read_text().startswith("<?xml")


def test_a_row_with_a_fault_is_compared_with_the_one_without():
    numbers = {"ranks": 2, "classes": 1, "operations": 10, "capture": 1.0, "proof": 1.0, "processor": 1.0, "peak_bytes": 1}
    sizes = {"suite": "end-to-end", "model": "m", "layers": 1, "tp": 2, "dp": 1, "pp": 1, "microbatches": 1}
    rows = [Row(**sizes, **numbers, fault=None, verdict="verified", total=2.0),
            Row(**sizes, **numbers, fault="one", verdict="unproven", total=5.0)]  # fmt: skip
    assert list(printed(rows).columns[-1].cells) == ["", "2.5"]


def test_what_is_not_as_it_should_be_is_no_measurement(monkeypatch):
    monkeypatch.setattr(Megatron, "_synchronised", lambda self, grad, held, groups: grad)
    with pytest.raises(InternalError, match=r"the benchmark Llama-3 8B on .* is refuted"):
        measured("end-to-end", "Llama-3 8B", Megatron(LLAMA, tp=2))


def test_every_suite_names_models_that_there_are():
    for suite in end_to_end.SUITES.values():
        for name, model in suite():
            assert name.removesuffix(" of transformers") in MODELS and model.sizes.layers >= model.pp
