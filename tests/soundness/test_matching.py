"""What must fit together on real ranks: making groups, building modules, and memory of equal size. Each beside its negative."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import assert_replays_as_gloo, capture_ranks, join_both_ways, named
from torch.nn.parallel import DistributedDataParallel

import graphguard as gg
from graphguard.api import capture_model
from graphguard.capture.torch import session
from graphguard.errors import CaptureError, MismatchError

WHOLE = {"x": gg.Input((4, 6), dtype=torch.float64)}
ONE_ORDER = "every rank makes every group, also those that it is not in, and all in one order"


@pytest.fixture(autouse=True)
def matched_by_classes_too(monkeypatch):
    """Whatever is matched here is also matched by classes of ranks, and both must say the same."""
    monkeypatch.setattr(session, "join", join_both_ways)


def rank() -> int:
    return dist.get_rank()


def finding(program, size=3, inputs=WHOLE):
    """The words of the first thing that does not fit, or None."""
    try:
        findings = capture_ranks(program, size, inputs).joint.findings
    except MismatchError as error:
        return error.finding.kind, error.finding.message
    return (findings[0].kind, findings[0].message) if findings else None


# ---------------------------------------------------------------------- groups are made together
def in_another_order(x):
    groups = [[0, 1], [0, 1, 2]]
    for group in reversed(groups) if rank() == 1 else groups:
        dist.new_group(group)


def pairs_in_another_order(x):
    groups = [[0, 1], [1, 2]]
    for group in reversed(groups) if rank() == 2 else groups:
        dist.new_group(group)


def left_out_before_another(x):
    if rank() < 2:
        dist.new_group([0, 1])
    dist.new_group([1, 2])


def one_more_before(x):
    if rank() == 0:
        dist.new_group([2])
    dist.new_group([0, 1])


def made_by_one_member(x):
    if rank() == 0:
        dist.new_group([0, 1])


def with_other_members(x):
    dist.new_group([0, 1] if rank() == 0 else [0, 1, 2])


def turned(x):
    dist.new_group([0, 1] if rank() == 0 else [1, 0], sort_ranks=False)


def alone_against_a_pair(x):
    dist.new_group([0, 1] if rank() < 2 else [rank()])


def local_groups_of_a_chain(x):
    for group in ([0, 1], [1, 2]):
        dist.new_group(group, use_local_synchronization=True)


def a_mesh_after_a_group_of_some(x):
    if rank() == 0:
        dist.new_group([0])
    dist.init_device_mesh("cpu", (2, 2))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (in_another_order, f"disagree: a group of ranks [0, 1] against one of ranks [0, 1, 2]; {ONE_ORDER}"),
        (pairs_in_another_order, f"disagree: a group of ranks [0, 1] against one of ranks [1, 2]; {ONE_ORDER}"),
        (left_out_before_another, f"disagree: a group of ranks [0, 1] against one of ranks [1, 2]; {ONE_ORDER}"),
        (one_more_before, f"where rank 1 does not: {ONE_ORDER}"),
        (made_by_one_member, f"where rank 1 does not: {ONE_ORDER}"),
        (with_other_members, f"disagree: a group of ranks [0, 1] against one of ranks [0, 1, 2]; {ONE_ORDER}"),
        (turned, f"disagree: a group of ranks [0, 1] against one of ranks [1, 0]; {ONE_ORDER}"),
        (alone_against_a_pair, f"disagree: a group of ranks [0, 1] against one of ranks [2]; {ONE_ORDER}"),
        (local_groups_of_a_chain, "where rank 2 does not: members must be in equally many groups by then"),
        (a_mesh_after_a_group_of_some, ONE_ORDER),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_groups_that_ranks_do_not_make_together_are_a_mismatch(program, words):
    kind, message = finding(program, 4)
    assert kind == "collective-mismatch" and message.endswith(words), message


def test_to_make_a_group_is_to_wait_for_its_members():
    def program(x):
        if rank() == 0:
            dist.new_group([0, 1])
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
            dist.new_group([0, 1])

    kind, message = finding(program, 2)
    assert kind == "deadlock" and "rank 0 waits in dist.new_group at" in message


def groups_of_their_own(x):
    """A group of one looks for nobody; two groups over the same ranks stay two where one of them is destroyed."""
    dist.all_reduce(x, group=dist.new_group([rank()]))
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank() == 0:
        dist.destroy_process_group(first)
    if rank() < 2:
        dist.all_reduce(x, group=second)
    return x


def local_groups(x):
    dist.all_reduce(x, group=dist.new_group([0, 1] if rank() < 2 else [2], use_local_synchronization=True))
    dist.all_reduce(x, group=dist.new_group(use_local_synchronization=True))
    return x


@pytest.mark.gloo
@named(groups_of_their_own, local_groups)
def test_groups_that_find_their_members_replay_as_gloo(program):
    captured = assert_replays_as_gloo(program, 3, WHOLE)
    assert not any(node.op == "dist.new_group" for graph in captured.ranks for node in graph.nodes)  # matched, then dropped
    assert any("leave out groups" in text for text in captured.assumptions) == (program is groups_of_their_own)


@pytest.mark.gloo
def test_a_group_left_out_by_a_rank_that_is_not_in_it_is_an_assumption_about_the_backend():
    def program(x):
        if rank() < 2:
            dist.all_reduce(x, group=dist.new_group([0, 1]))
        return x

    (text,) = (text for text in assert_replays_as_gloo(program, 3, WHOLE).assumptions if "leave out groups" in text)
    assert text.startswith("rank 2 does not make the group of ranks [0, 1], as others do at ")
    assert text.endswith("(gloo does, NCCL on bound devices does not)")


def test_what_hangs_before_an_exception_is_said_first():
    def program(x):
        if rank() == 0:
            dist.new_group([0])
        dist.new_group([0, 1])
        raise ValueError("never reached")

    assert finding(program, 2)[0] == "collective-mismatch"


# ---------------------------------------------------------------------- overlapping groups
def pairs():
    return [dist.new_group([n, n + 1]) for n in range(dist.get_world_size() - 1)]


def summed_along_a_chain(x):
    """The sum comes to the last rank by way of pairs, and goes back the same way."""
    groups, y, last = pairs(), x * 1, dist.get_world_size() - 1
    for n, group in enumerate(groups):
        if rank() in (n, n + 1):
            dist.reduce(y, n + 1, group=group)
    for n, group in reversed(list(enumerate(groups))):
        if rank() in (n, n + 1):
            dist.broadcast(y, n + 1, group=group)
    return y if last else x


def averaged_along_a_chain(x):
    y = x * 1
    for n, group in enumerate(pairs()):
        if rank() in (n, n + 1):
            dist.all_reduce(y, group=group)
    return y


def smoothed(x, first=1):
    """Halo rows by all_gather in pairs; `first` says which row of the left neighbour is taken."""
    edges, groups, n = torch.stack([x[0], x[-1]]), pairs(), rank()
    left = right = torch.zeros_like(x[:1])
    if n > 0:
        got = [torch.empty_like(edges) for _ in range(2)]
        dist.all_gather(got, edges, group=groups[n - 1])
        left = got[0][first : first + 1]
    if n < len(groups):
        got = [torch.empty_like(edges) for _ in range(2)]
        dist.all_gather(got, edges, group=groups[n])
        right = got[1][:1]
    padded = torch.cat([left, x, right])
    return padded[:-2] + padded[1:-1] + padded[2:]


def smooth(x):
    padded = torch.cat([torch.zeros_like(x[:1]), x, torch.zeros_like(x[:1])])
    return padded[:-2] + padded[1:-1] + padded[2:]


def by_heads(x):
    """Pairs reduce to their heads, the heads among themselves, and back."""
    own = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank() // 2]
    heads, head, y = dist.new_group([0, 2]), rank() // 2 * 2, x * 1
    dist.reduce(y, head, group=own)
    if rank() == head:
        dist.all_reduce(y, group=heads)
    dist.broadcast(y, head, group=own)
    return y


def of_other_sizes(x):
    dist.all_reduce(x, group=dist.new_group([0]) if rank() == 0 else None)
    return x


ROWS = {"x": gg.Input((8, 3), gg.Shard(0))}


def total(x):
    return x.view(4, 2, 3).sum(0)


@pytest.mark.parametrize(
    ("sequential", "program", "verdict"),
    [
        (total, summed_along_a_chain, "verified"),
        (total, averaged_along_a_chain, "refuted"),
        (smooth, smoothed, "verified"),
        (smooth, lambda x: smoothed(x, first=0), "refuted"),
        (total, by_heads, "verified"),
    ],
    ids=["chain", "chain that counts twice", "halo", "halo of the wrong row", "heads"],
)
def test_overlapping_groups_are_proved_and_refuted(sequential, program, verdict):
    assert gg.verify(sequential, program, mesh=4, inputs=ROWS).verdict == verdict


def test_groups_of_different_sizes_meet_at_one_operation():
    def program(x):
        alone, rest = dist.new_group([0]), dist.new_group([1, 2, 3])
        y = x * 1
        dist.all_reduce(y, group=rest if rank() else alone)
        return y if rank() else None

    assert gg.verify(lambda x: x * 3, program, mesh=4, inputs=WHOLE).verdict == "verified"
    assert gg.verify(lambda x: x * 2, program, mesh=4, inputs=WHOLE).verdict == "refuted"


# ---------------------------------------------------------------------- memory of equal size
def own(tensor):
    """One rank's form of a tensor, another one's of the same size."""
    return tensor.contiguous() if rank() == 0 else tensor.reshape(-1)


def of_equal_size(x):
    """Every communication that gloo takes between other shapes of equal size."""
    found, part = {}, x[:2]
    for name, call in {
        "sum": lambda y: dist.all_reduce(y),
        "max": lambda y: dist.all_reduce(y, dist.ReduceOp.MAX),
        "broadcast": lambda y: dist.broadcast(y, 1),
        "message": lambda y: dist.send(y, 1) if rank() == 0 else dist.recv(y, 0),
    }.items():
        found[name] = own(x * (rank() + 1.0))
        call(found[name])
    found["reduce"] = own(x * (rank() + 1.0))
    dist.reduce(found["reduce"], 1)
    found["reduce"] = found["reduce"] if rank() == 1 else None
    y = own(x * (rank() + 2.0))
    found["all_gather"] = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(found["all_gather"], y)
    found["gather"] = [torch.empty_like(y) for _ in range(2)] if rank() == 0 else None
    dist.gather(y, found["gather"], 0)
    found["scatter"] = own(torch.empty_like(part))
    dist.scatter(found["scatter"], [x[:2] * 1, x[2:] * 1] if rank() == 0 else None, 0)
    found["reduce_scatter"] = own(torch.empty_like(part))
    dist.reduce_scatter(found["reduce_scatter"], [own(x[:2]), own(x[2:])])
    found["all_to_all"] = [own(torch.empty_like(part)) for _ in range(2)]
    dist.all_to_all(found["all_to_all"], [own(x[:2] * (rank() + 1)), own(x[2:] * (rank() + 1))])
    found["all_to_all_single"] = torch.empty_like(y)
    dist.all_to_all_single(found["all_to_all_single"], y)
    rows = x.reshape((4, 6) if rank() == 0 else (2, 12))
    found["gathered"] = funcol.all_gather_tensor(rows, 0, dist.group.WORLD) * 1
    found["scattered"] = funcol.reduce_scatter_tensor(rows, "sum", 0, dist.group.WORLD) * 1
    return found


@pytest.mark.gloo
def test_other_shapes_of_equal_size_replay_as_gloo():
    assert_replays_as_gloo(of_equal_size, 2, WHOLE)


def test_the_proof_knows_that_memory_is_sent():
    def in_one_shape(x):
        one = {name: value for name, value in of_equal_size(x).items() if value is not None and name != "reduce"}
        return {
            "sum": one["sum"].reshape(4, 6), "max": one["max"].reshape(4, 6), "broadcast": one["broadcast"].reshape(4, 6),
            "all_gather": (one["all_gather"][0] + 3 * one["all_gather"][1]).reshape(4, 6),
            "scatter": one["scatter"].reshape(2, 6), "reduce_scatter": one["reduce_scatter"].reshape(2, 6),
            "all_to_all": (one["all_to_all"][0] + 3 * one["all_to_all"][1]).reshape(2, 6),
            "all_to_all_single": one["all_to_all_single"].reshape(2, 2, 6)[1].reshape(2, 6),
            "gathered": one["gathered"].reshape(8, 6), "scattered": one["scattered"].reshape(2, 6),
        }  # fmt: skip

    def sequential(x):
        return {
            "sum": x * 3, "max": torch.maximum(x, 2 * x), "broadcast": x * 2, "all_gather": x * 11, "scatter": x * 1,
            "reduce_scatter": x * 2, "all_to_all": x * 7, "all_to_all_single": x * 3, "gathered": torch.cat([x, x]),
            "scattered": x * 2,
        }  # fmt: skip

    report = gg.verify(sequential, in_one_shape, mesh=2, inputs=WHOLE)
    assert report.verdict == "verified", report.findings


def test_memory_in_another_order_is_not_the_same():
    def program(x):
        y = x * 1 if rank() == 0 else x.reshape(6, 4).t().contiguous()
        dist.all_reduce(y)
        return y

    assert gg.verify(lambda x: x * 2, program, mesh=2, inputs=WHOLE).verdict == "refuted"


def other_size(x):
    dist.all_reduce(x if rank() == 0 else x[:3] * 1)


def own_list_of_other_shapes(x):
    dist.all_gather([torch.empty(24, dtype=x.dtype) for _ in range(2)], x)


def own_root_of_another_shape(x):
    dist.gather(x, [torch.empty(24, dtype=x.dtype) for _ in range(2)] if rank() == 0 else None, 0)


def strides_and_another_shape(x):
    dist.all_reduce(x.t() if rank() == 0 else x.reshape(24))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (other_size, "f64[4, 6] against f64[3, 6]"),
        (own_list_of_other_shapes, "f64[4, 6] is sent where f64[24] is expected"),
        (own_root_of_another_shape, "f64[4, 6] is sent where f64[24] is expected"),
        (strides_and_another_shape, "the memory of their tensors is laid out differently; use `.contiguous()`"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_backends_refuse_stays_a_mismatch(program, words):
    assert finding(program, 2)[1].endswith(words)


def test_factors_that_differ_between_ranks_are_not_one_factor():
    def program(x):
        dist.all_reduce(x, op=dist._make_nccl_premul_sum(2.0 + rank()))
        return x

    assert gg.verify(lambda x: x * 4, program, mesh=2, inputs=WHOLE).verdict == "refuted"
    assert gg.verify(lambda x: x * 5, program, mesh=2, inputs=WHOLE).verdict != "refuted"


# ---------------------------------------------------------------------- modules are built together
class Linear(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(4, width))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return x @ self.weight * self.scale


def barrier_on_one_rank(model):
    if rank() == 0:
        dist.barrier()


def object_on_one_rank(model):
    if rank() == 0:
        dist.all_gather_object([None, None], 3)


def receives_that_wait_for_each_other(model):
    other = torch.zeros(2)
    dist.recv(other, 1 - rank())
    dist.send(other, 1 - rank())


def sizes_that_differ(model):
    dist.broadcast(torch.zeros(2 + rank()), 0)


def never_waited_for(model):
    if rank() == 0:
        dist.all_reduce(torch.zeros(2), async_op=True)


def result_that_nobody_uses(model):
    if rank() == 0:
        funcol.all_reduce(torch.zeros(2), "sum", dist.group.WORLD)


def groups_in_another_order(model):
    groups = [[0], [0, 1]]
    for group in reversed(groups) if rank() else groups:
        dist.new_group(group)


def one_monitored(model):
    dist.monitored_barrier() if rank() else dist.barrier()


def built(*calls):
    def build(mesh):
        model = Linear()
        for call in calls:
            call(model)
        return model

    return build


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (barrier_on_one_rank, "collective-mismatch"),
        (object_on_one_rank, "collective-mismatch"),
        (receives_that_wait_for_each_other, "deadlock"),
        (sizes_that_differ, "collective-mismatch"),
        (never_waited_for, "collective-mismatch"),
        (result_that_nobody_uses, "collective-mismatch"),
        (groups_in_another_order, "collective-mismatch"),
        (one_monitored, "collective-mismatch"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_what_does_not_fit_while_a_module_is_built_is_refuted(fault, kind):
    report = gg.verify_model(sequential=Linear, distributed=built(fault), mesh=2, inputs={"x": gg.Input((3, 4))})
    assert report.verdict == "refuted" and report.findings[0].kind == kind


def test_ddp_compares_the_shapes_of_its_parameters():
    def program(x):
        DistributedDataParallel(torch.nn.Linear(2, 3, bias=False) if rank() == 0 else torch.nn.Linear(3, 2, bias=False))

    assert finding(program, 2)[1].endswith("DDP with parameters of shapes [3, 2] against DDP with parameters of shapes [2, 3]")


def parameters_from_rank_0(model):
    dist.broadcast(model.weight.data, 0)


def scale_of_all_ranks(model):
    dist.all_reduce(model.scale)


def test_communication_that_fits_while_a_module_is_built_is_dropped_where_nothing_needs_it():
    build = built(barrier_of_all, parameters_from_rank_0, scale_of_all_ranks)
    captured = capture_model(Linear, build, mesh=2, inputs={"x": gg.Input((3, 4))})
    for graph in captured.ranks:
        assert [node.op for node in graph.nodes if node.communicates] == ["dist.all_reduce", "dist.wait"]
        assert graph.built == 0
    assert len(captured.joint.matches) == 1
    assert any(text.startswith("communication while the module was built") for text in captured.assumptions)


def barrier_of_all(model):
    dist.barrier()


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, "verified"), (1.0, "refuted")])
def test_a_buffer_that_ranks_sum_while_they_are_built(factor, verdict):
    def step(model, x):
        return model(x) * (factor if model.scale.grad_fn is None and not dist.is_initialized() else 1.0)

    report = gg.verify_model(
        sequential=Linear, distributed=built(scale_of_all_ranks), step=step, mesh=2, inputs={"x": gg.Input((3, 4))}
    )
    assert report.verdict == verdict


def test_what_one_rank_needs_of_a_communication_is_kept_on_all():
    """Only rank 1 uses what rank 0 sends while the modules are built."""

    def send(model):
        sent = torch.full((), 3.0) if rank() == 0 else torch.empty(())
        dist.broadcast(sent, 0)
        model.scale = torch.full((), 3.0) if rank() == 0 else sent

    def sequential():
        model = Linear()
        model.scale = torch.full((), 3.0)
        return model

    report = gg.verify_model(sequential=sequential, distributed=built(send), mesh=2, inputs={"x": gg.Input((3, 4))})
    assert report.verdict == "verified", report.findings


# ---------------------------------------------------------------------- what would not be seen
def summing_relation(full, coord):
    x = full["x"] * 1
    dist.all_reduce(x)
    return {"x": x}


def relation_with_a_group(full, coord):
    dist.new_group([0])
    return dict(full)


def relation_with_objects(full, coord):
    dist.all_gather_object([None, None], 1)
    return dict(full)


@pytest.mark.parametrize(
    ("relation", "does"),
    [
        (summing_relation, r"communicates \(dist.all_reduce\)"),
        (relation_with_a_group, "makes a group of ranks"),
        (relation_with_objects, r"communicates \(dist.barrier\)"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_an_input_relation_does_not_communicate(relation, does):
    words = f"the input relation of rank 0: .*the input relation {does}; .*so communicate in the program itself"
    with pytest.raises(CaptureError, match=words):
        gg.verify(lambda x: x, lambda x: x, mesh=2, inputs=WHOLE, local_inputs=relation)


def an_expected_layout_does_not_communicate(full, coord):
    dist.barrier()
    return full


def test_an_expected_layout_does_not_communicate():
    with pytest.raises(CaptureError, match=r"outputs= for rank 0: .*communicates \(dist.barrier\)"):
        layouts = {"out": an_expected_layout_does_not_communicate}
        gg.verify(lambda x: x * 1, lambda x: x * 1, mesh=2, inputs=WHOLE, outputs=layouts)


def through_a_store(x):
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "value") if rank() else store.wait(["key"])


def through_a_backend(x):
    dist.group.WORLD._get_backend(torch.device("cpu")).allreduce([x])


def through_shared_memory(x):
    return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name)


def in_a_world_of_its_own(x):
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def in_a_world_from_the_environment(x):
    dist.destroy_process_group()
    dist.init_process_group("gloo")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (through_a_store, r"exchanges values in a store \(wait\), which is not modelled; use object collectives"),
        (through_a_backend, "calls allreduce of a group's backend, which is not seen; call it in torch.distributed"),
        (through_shared_memory, "symm_mem.one_shot_all_reduce.default communicates in a way that is not modelled"),
        (in_a_world_of_its_own, "initialises torch.distributed again; it is initialised already"),
        (in_a_world_from_the_environment, "initialises torch.distributed again; it is initialised already"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_ways_around_torch_distributed_are_refused(program, words):
    with pytest.raises(CaptureError, match=f"rank 0: .*{words}"):
        capture_ranks(program, 2, WHOLE)
