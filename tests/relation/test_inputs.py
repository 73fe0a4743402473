"""The input relation: what each rank is given, against torch.chunk by hand; and every mistake in stating it, with its words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness import capture_both, random_inputs, rank_inputs

from graphguard import Input, Partial, Replicate, Shard
from graphguard.capture.front import mesh_of
from graphguard.errors import ProgramError, UsageError

F64 = torch.float64


def given_to_ranks(
    mesh: Any, inputs: dict[str, Input], local_inputs: Any = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Full tensors, and what the captured relation makes of them on every rank."""

    def program(**given):
        return {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}

    captured = capture_both(program, program, mesh, inputs, local_inputs)
    full = random_inputs(inputs)
    ranks = rank_inputs(captured, full)
    for graph, mine in zip(captured.ranks, ranks, strict=True):
        assert {name: value.shape for name, value in graph.inputs.items()} == {n: tuple(t.shape) for n, t in mine.items()}
    return full, ranks


def piece(tensor: torch.Tensor, dim: int, index: int, count: int) -> torch.Tensor:
    """torch.chunk's piece; an empty one for ranks beyond the last."""
    pieces = tensor.chunk(count, dim)
    return pieces[index] if index < len(pieces) else tensor.narrow(dim, 0, 0)


def assert_equal(have: torch.Tensor, want: torch.Tensor) -> None:
    assert have.dtype == want.dtype and torch.equal(have, want), (have.shape, want.shape)


# ---------------------------------------------------------------------- placements
@pytest.mark.parametrize("placement", [Replicate(), (Replicate(),), {}, {"world": Replicate()}], ids=str)
def test_replicated_input_is_whole_on_every_rank(placement):
    full, ranks = given_to_ranks(3, {"x": Input((5, 2), placement)})
    for mine in ranks:
        assert_equal(mine["x"], full["x"])


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("placed", [lambda p: p, lambda p: [p], lambda p: {"world": p}], ids=["bare", "list", "by axis"])
def test_sharded_input_is_cut_along_its_dim(dim, placed):
    full, ranks = given_to_ranks(2, {"x": Input((4, 6, 8), placed(Shard(dim)))})
    for index, mine in enumerate(ranks):
        assert_equal(mine["x"], piece(full["x"], dim, index, 2))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 9, 10])
def test_uneven_shards_follow_chunk_and_the_last_ranks_may_be_empty(rows):
    full, ranks = given_to_ranks(4, {"x": Input((rows, 2), Shard(0))})
    for index, mine in enumerate(ranks):
        assert_equal(mine["x"], piece(full["x"], 0, index, 4))
    assert_equal(torch.cat([mine["x"] for mine in ranks]), full["x"])


def test_chunk_leaves_the_last_ranks_empty():
    _, ranks = given_to_ranks(4, {"x": Input((5,), Shard(0))})
    assert [len(mine["x"]) for mine in ranks] == [2, 2, 1, 0]


THREE = {"dp": 2, "cp": 1, "tp": 2}


@pytest.mark.parametrize(
    "placement",
    [{"dp": Shard(0), "tp": Shard(1)}, {"tp": Shard(1), "dp": Shard(0)}, (Shard(0), Replicate(), Shard(1)),
     {"dp": Shard(0), "cp": Shard(2), "tp": Shard(-2)}],
    ids=str,
)  # fmt: skip
def test_axes_shard_dims_of_their_own_in_mesh_order(placement):
    full, ranks = given_to_ranks(THREE, {"x": Input((6, 5, 3), placement)})
    for index, mine in enumerate(ranks):
        dp, tp = divmod(index, 2)
        assert_equal(mine["x"], piece(piece(full["x"], 0, dp, 2), 1, tp, 2))


@pytest.mark.parametrize("rows", [3, 6, 7, 8, 13])
def test_two_axes_on_one_dim_nest_left_to_right(rows):
    full, ranks = given_to_ranks({"dp": 2, "tp": 3}, {"x": Input((rows, 2), {"tp": Shard(0), "dp": Shard(0)})})
    for index, mine in enumerate(ranks):
        dp, tp = divmod(index, 3)
        assert_equal(mine["x"], piece(piece(full["x"], 0, dp, 2), 0, tp, 3))
    assert_equal(torch.cat([mine["x"] for mine in ranks]), full["x"])


def test_an_axis_left_out_is_replicated():
    full, ranks = given_to_ranks({"dp": 2, "tp": 2}, {"x": Input((4, 6), {"tp": Shard(1)}), "y": Input((4,), {"dp": Shard(0)})})
    for index, mine in enumerate(ranks):
        assert_equal(mine["x"], piece(full["x"], 1, index % 2, 2))
        assert_equal(mine["y"], piece(full["y"], 0, index // 2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.int64, torch.complex64])
def test_partial_inputs_differ_and_sum_to_the_whole(dtype):
    full, ranks = given_to_ranks(3, {"x": Input((4, 5), Partial(), dtype)})
    assert len({tuple(mine["x"].reshape(-1).tolist()) for mine in ranks}) == 3
    assert all(mine["x"].dtype == dtype for mine in ranks)
    torch.testing.assert_close(ranks[0]["x"] + ranks[1]["x"] + ranks[2]["x"], full["x"])


@pytest.mark.parametrize("placement", [{"dp": Partial(), "tp": Shard(0)}, {"dp": Shard(0), "tp": Partial()}], ids=str)
def test_partial_beside_shard_sums_to_each_shard(placement):
    full, ranks = given_to_ranks({"dp": 2, "tp": 3}, {"x": Input((7, 2), placement, F64)})
    partial_first = isinstance(placement["dp"], Partial)
    shards = 3 if partial_first else 2
    for shard in range(shards):
        group = [mine["x"] for index, mine in enumerate(ranks) if (index % 3 if partial_first else index // 3) == shard]
        torch.testing.assert_close(sum(group), piece(full["x"], 0, shard, shards))


def test_partial_beside_replicate_has_equal_parts_on_the_replicas():
    full, ranks = given_to_ranks({"dp": 2, "tp": 2}, {"x": Input((3,), {"tp": Partial()}, F64)})
    for tp in range(2):
        assert_equal(ranks[tp]["x"], ranks[2 + tp]["x"])
    torch.testing.assert_close(ranks[0]["x"] + ranks[1]["x"], full["x"])


def test_two_partial_inputs_have_parts_of_their_own():
    _, ranks = given_to_ranks(2, {"x": Input((3,), Partial(), F64), "y": Input((3,), Partial(), F64)})
    assert not torch.equal(ranks[0]["x"], ranks[0]["y"])


def test_partial_over_two_axes_sums_over_both():
    full, ranks = given_to_ranks({"a": 2, "b": 2}, {"x": Input((3,), (Partial(), Partial()), F64)})
    torch.testing.assert_close(sum(mine["x"] for mine in ranks), full["x"])


# ---------------------------------------------------------------------- plain torch code
def zigzag(full, coord):
    pieces = full.chunk(4)
    return torch.cat([pieces[coord["cp"]], pieces[3 - coord["cp"]]])


def padded(full, coord):
    return torch.nn.functional.pad(full, (0, 0, coord["cp"], 1))


def permuted(full, coord):
    return full.permute(1, 0)[coord["cp"] :]


def strided(full, coord):
    return full[coord["cp"] :: 2].reshape(-1)


@pytest.mark.parametrize("local", [zigzag, padded, permuted, strided], ids=lambda f: f.__name__)
def test_local_says_any_layout_in_plain_torch(local):
    full, ranks = given_to_ranks({"cp": 2}, {"x": Input((8, 3), local=local)})
    for index, mine in enumerate(ranks):
        assert_equal(mine["x"], local(full["x"], {"cp": index}))


def test_local_is_given_the_coordinate_of_every_axis():
    def local(full, coord):
        assert list(coord) == ["dp", "tp"]
        return full[2 * coord["dp"] + coord["tp"]]

    full, ranks = given_to_ranks({"dp": 2, "tp": 2}, {"x": Input((4, 3), local=local)})
    for index, mine in enumerate(ranks):
        assert_equal(mine["x"], full["x"][index])


def test_local_is_given_contiguous_inputs_on_the_ranks():
    """A layout that is a view of the whole becomes memory of the rank's own."""
    captured = capture_both(lambda x: x, lambda x: x.view(-1), 2, {"x": Input((4, 3), local=lambda full, coord: full.t())})
    assert [graph.inputs["x"].shape for graph in captured.ranks] == [(3, 4)] * 2


def test_local_inputs_give_each_rank_inputs_of_its_own():
    def local_inputs(full, coord):
        index = coord["tp"]
        q, k = (full[name].chunk(2)[index] for name in ("q", "k"))
        fused = {"qk": torch.cat([q, k]), "scale": 0.5, "name": "rank", "nested": {"a": [q * 2, None]}}
        return fused if index == 0 else {**fused, "extra": k}

    inputs = {"q": Input((4, 2)), "k": Input((4, 2))}

    def sequential(q, k):
        return q + k

    def distributed(qk, scale, name, nested, extra=None):
        assert scale == 0.5 and name == "rank" and nested["a"][1] is None
        return qk * scale + nested["a"][0].sum() + (0 if extra is None else extra.sum())

    captured = capture_both(sequential, distributed, {"tp": 2}, inputs, local_inputs)
    full = random_inputs(inputs)
    for index, mine in enumerate(rank_inputs(captured, full)):
        q, k = full["q"].chunk(2)[index], full["k"].chunk(2)[index]
        assert list(mine) == ["qk", "nested.a.0"] + ["extra"] * index
        assert list(captured.ranks[index].inputs) == list(mine)
        assert_equal(mine["qk"], torch.cat([q, k]))
        assert_equal(mine["nested.a.0"], q * 2)


def test_the_same_input_under_two_names_is_two_inputs():
    spec = Input((3,), Shard(0))
    full, ranks = given_to_ranks(3, {"x": spec, "y": spec})
    assert not torch.equal(full["x"], full["y"])
    for index, mine in enumerate(ranks):
        assert_equal(mine["x"], full["x"][index : index + 1])
        assert_equal(mine["y"], full["y"][index : index + 1])


# ---------------------------------------------------------------------- mistakes
def takes_x(x):
    return x


MESH = {"dp": 2, "tp": 2}


def failing(match: str) -> Any:
    return pytest.raises(UsageError, match=f"^{re.escape(match)}$")


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Shard(0), "input 'x': on a mesh of several axes write {axis: placement} or one placement per axis, not Shard(dim=0)"),
        ({"pp": Shard(0)}, "input 'x' is placed on the axis 'pp'; the mesh has ['dp', 'tp']"),
        ((Shard(0),), "input 'x' has 1 placements for 2 mesh axes"),
        ((Shard(0),) * 3, "input 'x' has 3 placements for 2 mesh axes"),
        ({"dp": Shard(2)}, "input 'x': Shard(2) names a dim that its shape (4, 4) does not have"),
        ({"dp": Shard(-3)}, "input 'x': Shard(-3) names a dim that its shape (4, 4) does not have"),
        ({"dp": Partial("avg")}, "input 'x': an input may be a Partial sum only, not 'avg'"),
        ({"dp": Partial("max")}, "input 'x': an input may be a Partial sum only, not 'max'"),
        ({"dp": 0}, "input 'x' has 0 on axis 'dp'; use Replicate(), Shard(dim) or Partial()"),
        ("dp", "input 'x': on a mesh of several axes write {axis: placement} or one placement per axis, not 'dp'"),
    ],
    ids=str,
)
def test_placement_that_does_not_fit_is_refused(placement, message):
    with failing(message):
        capture_both(takes_x, takes_x, MESH, {"x": Input((4, 4), placement)})


@pytest.mark.parametrize("placement", [0, "x", None], ids=str)
def test_what_is_no_placement_is_refused_on_one_axis_too(placement):
    with failing(f"input 'x' has {placement!r} on axis 'world'; use Replicate(), Shard(dim) or Partial()"):
        capture_both(takes_x, takes_x, 2, {"x": Input((4,), placement)})


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({}, "the mesh has no axes; write for example mesh={'tp': 4}"),
        (0, "mesh axis 'world' has size 0; every axis needs at least one rank"),
        ({"dp": 2, "tp": -1}, "mesh axis 'tp' has size -1; every axis needs at least one rank"),
        ({"dp": 2.0}, "the mesh must map axis names to sizes, not 'dp' to 2.0"),
        ({0: 2}, "the mesh must map axis names to sizes, not 0 to 2"),
        (True, "the mesh must map axis names to sizes, not 'world' to True"),
        ("tp", "the mesh is 'tp'; write {axis: size}, or the number of ranks"),
    ],
    ids=str,
)
def test_mesh_that_is_none_is_refused(mesh, message):
    with failing(message):
        mesh_of(mesh)


def test_mesh_lays_ranks_out_row_major():
    mesh = mesh_of({"dp": 2, "tp": 3})
    assert [tuple(mesh.coordinate(rank).values()) for rank in range(mesh.size)] == [(d, t) for d in range(2) for t in range(3)]
    assert mesh_of(4).axes == (("world", 4),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, -1)}, "gg.Input: the shape (2, -1) is not a tuple of sizes"),
        ({"shape": (2, 1.5)}, "gg.Input: the shape (2, 1.5) is not a tuple of sizes"),
        ({"shape": "ab"}, "gg.Input: the shape 'ab' is not a tuple of sizes"),
        ({"shape": None}, "gg.Input: the shape None is not a tuple of sizes"),
        ({"shape": -1}, "gg.Input: the shape -1 is not a tuple of sizes"),
        ({"shape": (True,)}, "gg.Input: the shape (True,) is not a tuple of sizes"),
        ({"shape": (2,), "dtype": "int64"}, "gg.Input: 'int64' is not a dtype; write for example torch.int64"),
        ({"shape": (2,), "dtype": int}, "gg.Input: <class 'int'> is not a dtype; write for example torch.int64"),
        ({"shape": (2,), "placement": torch.int64}, "gg.Input: torch.int64 is given as the placement; write dtype=torch.int64"),
        ({"shape": (2,), "low": 3, "high": 3}, "gg.Input: no value v has 3 <= v < 3"),
        ({"shape": (2,), "placement": Shard(0), "local": zigzag}, "gg.Input: give a placement or local=, not both"),
        ({"shape": (2,), "local": 3}, "gg.Input: local= is int, not a function of (full, coord)"),
    ],
    ids=lambda item: "" if isinstance(item, str) else str(sorted(item)),
)
def test_input_that_is_none_is_refused(arguments, message):
    with failing(message):
        Input(**arguments)


NO_Z = "the distributed program takes_x takes no input 'z'; it takes ['x']"


def test_shape_may_be_one_size_or_empty():
    assert Input(3).shape == (3,) and Input(()).shape == () and Input(torch.Size([2, 0])).shape == (2, 0)


@pytest.mark.parametrize(
    ("sequential", "distributed", "inputs", "message"),
    [
        (takes_x, takes_x, {"y": Input(2)}, "the sequential program takes_x takes no input 'y'; it takes ['x']"),
        (takes_x, takes_x, {}, "the sequential program takes_x needs 'x', which is not among its inputs []"),
        (lambda **any: any, takes_x, {"x": Input(2), "z": Input(2)}, NO_Z),
        (lambda **any: any, takes_x, {"z": Input(2)}, NO_Z),
        (takes_x, None, {"x": Input(2)}, "the distributed program is NoneType, not a function"),
        (takes_x, takes_x, {"x": (2, 2)}, "input 'x' is tuple; write gg.Input(shape, placement)"),
    ],
    ids=range(6),
)  # fmt: skip
def test_inputs_that_programs_do_not_take_are_refused(sequential, distributed, inputs, message):
    with failing(message):
        capture_both(sequential, distributed, 2, inputs)


def test_local_that_returns_no_tensor_is_refused():
    with failing("input 'x': local= returned list, not a tensor"):
        capture_both(takes_x, takes_x, 2, {"x": Input(4, local=lambda full, coord: list(full.chunk(2)))})


@pytest.mark.parametrize(
    ("spec", "local_inputs", "message"),
    [
        (Input(4, Shard(0)), lambda full, coord: full,
         "input 'x' has a placement beside local_inputs=, which already says what ranks get"),
        (Input(4, local=lambda full, coord: full), lambda full, coord: full,
         "input 'x' has a placement beside local_inputs=, which already says what ranks get"),
        (Input(4), lambda full, coord: full["x"], "local_inputs= returned Tensor, not a dict of inputs"),
        (Input(4), lambda full, coord: {"y": full["x"]}, "the distributed program takes_x takes no input 'y'; it takes ['x']"),
        (Input(4), lambda full, coord: {}, "the distributed program takes_x needs 'x', which is not among its inputs []"),
    ],
    ids=["placement", "local", "no dict", "unknown", "missing"],
)  # fmt: skip
def test_local_inputs_that_do_not_fit_are_refused(spec, local_inputs, message):
    with failing(message):
        capture_both(takes_x, takes_x, 2, {"x": spec}, local_inputs)


def test_exception_in_local_is_shown_with_its_rank_and_line():
    def local(full, coord):
        return full[4 // (1 - coord["world"]) :]

    with pytest.raises(
        ProgramError, match=r"^the input relation of rank 1 raised ZeroDivisionError at .*test_inputs\.py:\d+ in local: "
    ):
        capture_both(takes_x, takes_x, 2, {"x": Input(8, local=local)})
