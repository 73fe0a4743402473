"""Models of real libraries, built by ordinary code: what is captured computes what the library computes."""

import importlib
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from harness import ROOT, assert_replays_as_gloo, assert_same, capture_one, filled, flat

from graphguard.api import capture_model, train_step
from graphguard.capture.front import ranks_apart
from graphguard.capture.torch.adapters import versions
from graphguard.capture.torch.escapes import text
from graphguard.capture.torch.escapes.imports import when_imported
from graphguard.capture.torch.relation.inputs import Input, Shard
from graphguard.errors import CaptureError
from graphguard.graph.rank_class import same_graph
from graphguard.oracle.replay import replay, replay_joint

VOCABULARY = 48
IDS = {"ids": Input((2, 8), dtype=torch.int64, high=VOCABULARY)}


def random_tensors(graph, seed=0):
    """A value for every input of a graph: parameters are small, tokens in range, masks causal."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, value in graph.inputs.items():
        if value.dtype == "bool":
            made[name] = torch.ones(value.shape, dtype=torch.bool).tril().logical_not()
        elif value.dtype == "int64":
            made[name] = torch.randint(0, 8, value.shape, generator=generator)
        else:
            made[name] = torch.randn(value.shape, generator=generator, dtype=getattr(torch, value.dtype)) / 4
    return made


def part(full, shape, rank):
    """The part of a parameter that a rank holds, cut along the one dim in which the shapes differ."""
    for dim, size in enumerate(shape):
        if size != full.shape[dim]:
            full = full.narrow(dim, rank * size, size)
    return full


def replay_both(captured):
    """The sequential outputs, and every rank's on its own parts of the same tensors. All in float64."""
    assert not captured.joint.findings, captured.joint.findings
    full = random_tensors(captured.sequential)
    parts = [
        {name: part(full[name], value.shape, graph.rank) for name, value in graph.inputs.items()} for graph in captured.ranks
    ]
    return replay(captured.sequential, full, wide=True), replay_joint(captured.joint, parts, wide=True)


def assert_gradients_are_parts(captured):
    """Every rank has the sequential loss, and of every gradient what its layout says, or else what its parameter has."""
    expected, got = replay_both(captured)
    for graph, outputs in zip(captured.ranks, got, strict=True):
        wanted = {path: part(tensor, outputs[path].shape, graph.rank) for path, tensor in expected.items()}
        for path, layout in graph.layouts.items():
            dim = re.fullmatch(r"Shard\(dim=(\d)\)", layout.placements[0])
            assert dim or layout.placements == ("Replicate()",)
            wanted[path] = expected[path].chunk(len(got), int(dim[1]))[graph.rank] if dim else expected[path]
        assert_same(outputs, wanted, tolerance=1e-11, who=graph.name)


# ---------------------------------------------------------------------- transformers
def test_transformers_tensor_parallel_plan_replays_as_the_library_on_gloo():
    pytest.importorskip("transformers")
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    def program(ids, w, mesh):
        model = apply_tensor_parallelism(filled(transformers_model("Llama"), w), mesh)
        outputs = train_step(causal_loss)(model, ids=ids)
        return {"loss": outputs["loss"], "grads": outputs["grads"]}

    assert_replays_as_gloo(program, 2, {**IDS, "w": Input((8000,), dtype=torch.float64)}, tolerance=1e-9)


def transformers_model(kind):
    import transformers

    transformers.logging.set_verbosity_error()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "vocab_size": VOCABULARY, "use_cache": False}  # fmt: skip
    if kind == "GPT2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": VOCABULARY, "use_cache": False,
                 "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def causal_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "GPT2"])
def test_transformers_models_replay_as_eager(kind):
    pytest.importorskip("transformers.models.auto.modeling_auto")  # imported once, not in every rank
    captured = capture_model(
        lambda: transformers_model(kind),
        lambda mesh: transformers_model(kind),
        mesh=1,
        inputs=IDS,
        step=train_step(causal_loss),
    )
    full = random_tensors(captured.sequential)
    model = transformers_model(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(full[f"params.{name}"])
    assert_same(replay(captured.sequential, full), flat(train_step(causal_loss)(model, ids=full["ids"])))


@pytest.mark.parametrize(("kind", "world"), [("Llama", 2), ("Qwen2", 4)])
def test_transformers_tensor_parallel_plan_has_the_sequential_gradients(kind, world):
    pytest.importorskip("transformers")
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    def distributed(mesh):
        return apply_tensor_parallelism(transformers_model(kind), mesh)

    captured = capture_model(
        lambda: transformers_model(kind), distributed, mesh={"tp": world}, inputs=IDS, step=train_step(causal_loss)
    )
    sharded = [
        name for name, value in captured.ranks[0].inputs.items() if value.shape != captured.sequential.inputs[name].shape
    ]
    assert len(sharded) >= 2 * 7  # the plan has been applied: four projections of attention and three of the MLP per layer
    assert_gradients_are_parts(captured)


# ---------------------------------------------------------------------- megatron-core
def megatron_model(tp, **options):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert not parallel_state.model_parallel_is_initialized()  # every rank starts from a clean state
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, tensor_model_parallel_size=tp, params_dtype=torch.float64,
        attention_dropout=0.0, hidden_dropout=0.0, bias_dropout_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, **options,
    )  # fmt: skip
    return GPTModel(
        config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=16, position_embedding_type="rope"
    )


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def megatron_alone():
    """megatron-core needs process groups even for one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return megatron_model(1)


def vocabulary_parallel_loss(model, ids, positions, mask):
    return model(ids, positions, mask, labels=ids).mean()


def train_and_sum_norms(model, **inputs):
    """A step with what finalize_model_grads does for parameters that see a part of the sequence only."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads

    outputs = train_step(vocabulary_parallel_loss)(model, **inputs)
    model.ddp_config = DistributedDataParallelConfig()
    _allreduce_non_tensor_model_parallel_grads([model], model.config)
    return outputs


def capture_megatron(world, step, **options):
    pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")  # imported once, not in every rank
    inputs = {
        "ids": Input((2, 8), dtype=torch.int64, high=VOCABULARY),
        "positions": Input((2, 8), dtype=torch.int64, high=8),
        "mask": Input((2, 1, 8, 8), dtype=torch.bool),
    }
    return capture_model(
        megatron_alone, lambda mesh: megatron_model(world, **options), mesh={"tp": world}, inputs=inputs, step=step
    )


@pytest.mark.parametrize(("world", "options"), [(2, {}), (4, RECOMPUTED)], ids=["plain", "recomputed"])
def test_megatron_tensor_parallelism_has_the_gradients_of_one_rank(world, options):
    assert_gradients_are_parts(capture_megatron(world, train_step(vocabulary_parallel_loss), **options))


def test_megatron_groups_of_many_ranks_are_those_of_each_rank():
    """By classes, a rank is captured as it is alone; a warning on rank 0 does not keep it apart."""
    pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")

    def split(shape, dtype):
        return Input(shape, {"dp": Shard(0)}, dtype, high=8)

    inputs = {
        "ids": split((4, 8), torch.int64),
        "positions": split((4, 8), torch.int64),
        "mask": split((4, 1, 8, 8), torch.bool),
    }
    found = []
    for apart in (False, True):
        with ranks_apart(apart):
            step = train_step(vocabulary_parallel_loss)
            found.append(
                capture_model(megatron_alone, lambda mesh: megatron_model(2), mesh={"dp": 4, "tp": 2}, inputs=inputs, step=step)
            )
    at_once, alone = found
    assert at_once.classes == 1 and alone.classes is None
    assert all(map(same_graph, at_once.ranks, alone.ranks)) and all(map(same_graph, at_once.relations, alone.relations))


def cuda_is_the_cpu():
    """All that megatron-core asks of torch.cuda in these programs. The library itself stays as it is."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()


def test_megatron_tensor_parallelism_replays_as_the_library_on_gloo():
    pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")

    def program(ids, positions, mask, w):
        if dist.get_backend() == "gloo":
            cuda_is_the_cpu()
        model = filled(megatron_model(dist.get_world_size(), use_cpu_initialization=True).double(), w)
        loss = vocabulary_parallel_loss(model, ids, positions, mask)
        loss.backward()
        return {"loss": loss.detach(), "grads": {name: parameter.grad for name, parameter in model.named_parameters()}}

    inputs = {
        "ids": Input((2, 8), dtype=torch.int64, high=VOCABULARY),
        "positions": Input((2, 8), dtype=torch.int64, high=8),
        "mask": Input((2, 1, 8, 8), dtype=torch.bool),
        "w": Input((6000,), dtype=torch.float64),
    }
    assert_replays_as_gloo(program, 2, inputs, tolerance=1e-5)  # its cross entropy and softmax are in float32


def test_megatron_sequence_parallelism_has_the_gradients_of_one_rank():
    captured = capture_megatron(2, train_and_sum_norms, sequence_parallel=True)
    assert {node.op for node in captured.ranks[0].nodes} >= {"dist.all_gather_into_tensor", "dist.reduce_scatter_tensor"}
    assert any("norms under sequence parallelism" in statement for statement in captured.assumptions)
    assert_gradients_are_parts(captured)


def test_megatron_sequence_parallelism_without_finalizing_has_partial_norm_gradients():
    expected, got = replay_both(capture_megatron(2, train_step(vocabulary_parallel_loss), sequence_parallel=True))
    norms = [path for path in expected if "layernorm" in path]
    assert norms
    for path in norms:
        torch.testing.assert_close(got[0][path] + got[1][path], expected[path])
        assert not torch.allclose(got[0][path], expected[path])


@pytest.mark.parametrize("overlapped", [False, True])
def test_megatron_data_parallelism_finalizes_to_the_gradients_of_one_rank(overlapped):
    """Two replicas of two ranks with sequence parallelism: gradient buffers, their all-reduce, and finalize_model_grads."""
    pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    def distributed(mesh):
        model = megatron_model(2, sequence_parallel=True)
        return DistributedDataParallel(model.config, DistributedDataParallelConfig(overlap_grad_reduce=overlapped), model)

    def step(model, **inputs):
        if not isinstance(model, DistributedDataParallel):
            return train_step(vocabulary_parallel_loss)(model, **inputs)
        loss = vocabulary_parallel_loss(model, **inputs)
        loss.backward()
        finalize_model_grads([model])
        return {"loss": loss.detach(), "grads": {name: p.main_grad for name, p in model.module.named_parameters()}}

    def split(shape, dtype):
        return Input(shape, {"dp": Shard(0)}, dtype, high=8)

    inputs = {
        "ids": split((4, 8), torch.int64),
        "positions": split((4, 8), torch.int64),
        "mask": split((4, 1, 8, 8), torch.bool),
    }
    captured = capture_model(megatron_alone, distributed, mesh={"dp": 2, "tp": 2}, inputs=inputs, step=step)
    assert not captured.joint.findings, captured.joint.findings
    full = random_tensors(captured.sequential)
    parts = []
    for graph, relation in zip(captured.ranks, captured.relations, strict=True):
        given = {**full, **replay(relation, full)}
        tp = graph.mesh.coordinate(graph.rank)["tp"]
        parts.append({name: part(given[name], value.shape, tp) for name, value in graph.inputs.items()})
    expected, got = replay(captured.sequential, full, wide=True), replay_joint(captured.joint, parts, wide=True)
    torch.testing.assert_close(sum(outputs["loss"] for outputs in got) / 4, expected.pop("loss"))
    for rank, outputs in enumerate(got):
        del outputs["loss"]
        wanted = {path: part(tensor, outputs[path].shape, rank % 2) for path, tensor in expected.items()}
        assert_same(outputs, wanted, tolerance=1e-11, who=f"rank {rank}")


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "libraries")


def gradients_of(model, loss):
    loss.backward()
    return {"loss": loss.detach(), "grads": {name: parameter.grad for name, parameter in model.named_parameters()}}


def test_megatron_experts_replay_as_the_library_on_gloo(examples):
    pytest.importorskip("megatron.core.models.gpt.gpt_layer_specs")
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron_experts import layer, layer_loss

    def program(x, w):
        if dist.get_backend() == "gloo":
            cuda_is_the_cpu()
            moe_utils.te_general_gemm = None  # a name that is missing where Transformer Engine is
            token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()
        model = filled(layer(2, use_cpu_initialization=True).double(), w)
        return gradients_of(model, layer_loss(model, x))

    inputs = {"x": Input((4, 4, 8), Shard(0), torch.float64), "w": Input((1000,), dtype=torch.float64)}
    assert_replays_as_gloo(program, 2, inputs, tolerance=1e-9)


# ---------------------------------------------------------------------- torchtitan, accelerate
def test_torchtitan_tensor_parallelism_replays_as_the_library_on_gloo(examples):
    pytest.importorskip("torchtitan")
    import torchtitan_llama as titan

    def program(ids, w):
        dims = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": 2}
        if dist.get_backend() == "gloo":
            sys.modules["torchtitan.distributed.parallel_dims"].device_type = "cpu"  # it lays meshes on GPUs
        titan.set_spmd_backend("partial_dtensor")
        planned = titan.config()
        titan.set_llama3_sharding_config(planned, enable_sp=True)
        model = planned.build()
        model.init_states()
        filled(model, w)
        model.parallelize(titan.ParallelDims(**dims, spmd_backend="partial_dtensor"))
        with titan.loss_parallel():
            return gradients_of(model, titan.loss(model, ids, ids))

    inputs = {"ids": Input((4, 8), dtype=torch.int64, high=32), "w": Input((4000,))}
    assert_replays_as_gloo(program, 2, inputs, tolerance=1e-5)


def test_an_accelerator_replays_as_the_library_on_gloo():
    accelerate = pytest.importorskip("accelerate")

    def program(x, target, w):
        model = filled(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)), w)
        accelerator = accelerate.Accelerator(cpu=True)
        loss = torch.nn.functional.mse_loss(accelerator.prepare_model(model)(x), target)
        accelerator.backward(loss)
        return {"loss": loss.detach(), "grads": {name: parameter.grad for name, parameter in model.named_parameters()}}

    batch = Input((4, 4), Shard(0))
    assert_replays_as_gloo(program, 2, {"x": batch, "target": batch, "w": Input((58,))})


# ---------------------------------------------------------------------- deepspeed
@pytest.mark.parametrize("stage", [0, 1, 2, 3] if os.environ.get("GRAPHGUARD_TEST_CASES") == "all" else [3])
def test_a_deepspeed_engine_replays_as_the_library_on_gloo(stage, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # before the import, which looks for devices
    deepspeed = pytest.importorskip("deepspeed")
    for name in ("stage_1_and_2", "stage3"):  # imported once, not in every rank
        importlib.import_module(f"deepspeed.runtime.zero.{name}")
    buckets = {"reduce_bucket_size": 64, "allgather_bucket_size": 64, "stage3_prefetch_bucket_size": 16}

    def program(x, target, w):
        if dist.get_backend() == "gloo":
            sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would compile a library of its own
        model = filled(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)), w)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **buckets},
            "zero_allow_untested_optimizer": True,
        }
        engine = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))[0]
        loss = torch.nn.functional.mse_loss(engine(x), target)
        engine.backward(loss)
        engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return {"loss": loss.detach(), "after": {name: p.detach().clone() for name, p in model.named_parameters()}}

    batch = Input((4, 4), Shard(0))
    assert_replays_as_gloo(program, 2, {"x": batch, "target": batch, "w": Input((58,))})


# ---------------------------------------------------------------------- how libraries are adjusted
def test_a_library_that_the_program_imports_itself_is_adjusted(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("answer = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    before = len(sys.meta_path)
    when_imported("imported_late", lambda module: setattr(module, "answer", module.answer + 1))
    assert "imported_late" not in sys.modules
    assert importlib.import_module("imported_late").answer == 2
    when_imported("imported_late", lambda module: setattr(module, "answer", 7))
    assert sys.modules.pop("imported_late").answer == 7 and len(sys.meta_path) == before


def told(message, force=False):
    """What a library calls its own print."""


def tells(x):
    told(f"{x}", force=False)
    return x + 1


def decides(x):
    told("words", force=f"{x}" == "1")
    return x + 1


def test_text_may_be_made_for_a_function_of_a_library_that_only_prints(monkeypatch):
    monkeypatch.setattr(text, "_PRINTERS", [])
    x = {"x": Input((2,))}
    with pytest.raises(CaptureError, match="makes text of a tensor"):
        capture_one(tells, x)
    text.only_prints(told)
    assert len(capture_one(tells, x).nodes) == 1
    with pytest.raises(CaptureError, match="makes text of a tensor"):
        capture_one(decides, x)


ADAPTED = {"torch": "torch", "megatron-core": "megatron.core.tensor_parallel.random", "deepspeed": "deepspeed"}


@pytest.mark.parametrize("library", ADAPTED)
def test_another_version_of_a_library_is_an_assumption_and_a_warning(library, monkeypatch):
    assert ADAPTED.keys() == versions.TESTED.keys()
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip(ADAPTED[library])
    monkeypatch.setitem(versions.TESTED, library, "0.0")
    statement = rf"{library} \d+\.\d+\.\d+ behaves as 0.0, with which its adjustments were tested"
    with pytest.warns(UserWarning, match=f"taken for granted: {statement}"):
        assumptions = capture_one(lambda x: x + 1, {"x": Input((2,))}).assumptions
    assert any(re.fullmatch(statement, assumption) for assumption in assumptions)
