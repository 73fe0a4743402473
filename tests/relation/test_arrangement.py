"""Outputs that the ranks hold in tiles of their own: what is proved of them, what is refuted, and what is said."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import graphguard as gg
from graphguard import Replicate, Shard, UsageError
from graphguard.relation.arrangement import Arrangement, Tile

PATHS = ("swapped", "turned", "flat", "columns", "rows", "overlapping", "uneven", "some", "grid", "left_out", "other_rows")


def doubled(x):
    return dict.fromkeys(PATHS, x * 2)


def in_tiles(x):
    rank, y = dist.get_rank(), x * 2
    return {
        "swapped": y.chunk(2)[1 - rank // 2],
        "turned": y.t(),
        "flat": y.reshape(-1),
        "columns": y.chunk(2, 1)[rank % 2].reshape(-1),
        "rows": y[rank],
        "overlapping": y[: 3] if rank < 2 else y[1:],
        "uneven": y[:1] if rank < 2 else y[1:],
        "some": y if rank < 3 else None,  # three ranks of 2 x 2
        "grid": y.chunk(2)[rank % 2].chunk(2, 1)[rank // 2],
        "left_out": y[:2],
        "other_rows": y[[0, 2, 1, 3]],
    }  # fmt: skip


@pytest.fixture(scope="module")
def report():
    return gg.verify(doubled, in_tiles, mesh={"dp": 2, "tp": 2}, inputs={"x": gg.Input((4, 6))})


@pytest.mark.parametrize(
    ("path", "expression"),
    [
        ("swapped", "concat(rank2.swapped, rank0.swapped, dim=0)"),
        ("turned", "rank0.turned.permute(1, 0)"),
        ("flat", "rank0.flat.reshape(4, 6)"),
        ("columns", "concat(rank0.columns.reshape(4, 3), rank1.columns.reshape(4, 3), dim=1)"),
        ("rows", "concat(rank0.rows.reshape(1, 6), rank1.rows.reshape(1, 6), rank2.rows.reshape(1, 6), "
                 "rank3.rows.reshape(1, 6), dim=0)"),
        ("overlapping", "concat(rank0.overlapping, rank2.overlapping[2:], dim=0)"),
        ("uneven", "concat(rank0.uneven, rank2.uneven, dim=0)"),
        ("some", "rank0.some   (equal on all 3 ranks)"),
    ],
)  # fmt: skip
def test_tiles_of_the_ranks_own_are_proved(report, path, expression):
    assert report.relation[path].text == f"{path} = {expression}"
    note = f"{path} is made of tiles that no placement says: state outputs= to make that a fault"
    assert report.relation[path].note == (None if path == "some" else note)


def test_tiles_that_leave_something_out_and_rows_in_another_order_are_refuted(report):
    assert report.verdict == "refuted"
    messages = {finding.output: finding.message for finding in reversed(report.findings)}
    assert set(messages) == {"left_out", "other_rows"}
    assert messages["other_rows"].startswith(
        "other_rows: all of dim 0 is there, in another order: rank 0 holds 0:1 and 2:3 and 1:2 and 3:4, rank 1 holds"
    )
    assert 'if that is meant, state it as outputs={"other_rows": fn}, with fn(full, coord)' in messages["other_rows"]


def test_a_grid_in_the_other_order_is_one_of_placements(report):
    assert report.relation["grid"].placements == (("dp", "Shard(1)"), ("tp", "Shard(0)"))


def test_the_whole_where_a_shard_is_expected_has_a_counterexample_that_runs(tmp_path):
    inputs = {"x": gg.Input((4, 6))}
    report = gg.verify(lambda x: x * 2, lambda x: x * 2, mesh=2, inputs=inputs, outputs={"out": Shard(0)})
    assert report.findings[0].message == "out = rank0.out (equal on all 2 ranks), but Shard(0) is expected"
    first = "counterexample: on rank 1, out[0, 0] is 2, where the sequential program has 0 at [2, 0]"
    assert report.counterexample.lines()[0] == first
    report.counterexample.save(tmp_path / "differs.py")
    run = subprocess.run([sys.executable, tmp_path / "differs.py"], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and run.stderr.endswith("AssertionError: 0.0 is not 2.0\n")


def test_shapes_that_are_no_part_are_told():
    def of_other_shapes(x):
        large = torch.zeros(5)
        turned = x.sum()  # on one line they would be one finding
        return {"large": large, "turned": turned}

    constants = gg.verify(
        lambda x: {"large": torch.zeros(4), "turned": x},
        of_other_shapes,
        mesh=2,
        inputs={"x": gg.Input((2, 3))},
    )
    messages = {finding.output: finding.message for finding in constants.findings}
    assert messages["large"] == "large: rank 0 holds a tensor of shape [5], which is no part of one of shape [4]"
    assert messages["turned"] == "turned: rank 0 holds a tensor of shape [], which is no part of one of shape [2, 3]"
    assert constants.counterexample is not None


def test_what_is_expected_of_ranks_that_form_no_grid_is_an_error():
    with pytest.raises(UsageError, match="which only the ranks 0, 1, 2 return; they form no sub-grid of the mesh a=2 x b=2"):
        gg.verify(
            lambda x: x,
            lambda x: x if dist.get_rank() < 3 else None,
            mesh={"a": 2, "b": 2},
            inputs={"x": gg.Input((4,))},
            outputs={"out": Replicate()},
        )


def test_minima_of_parts_are_the_minimum():
    inputs = {"x": gg.Input((4, 6), Shard(0))}
    stated = gg.verify(lambda x: x.amin(), lambda x: x.amin(), mesh=2, inputs=inputs, outputs={"out": gg.Partial("min")})
    assert str(stated.relation) == "out = min(rank0.out, rank1.out)"


def test_tiles_are_joined_by_the_fewest_cuts():
    tiles = {0: (Tile(((0, 2), (0, 2)), (0, 1), (2, 2)),), 1: (Tile(((0, 4), (2, 4)), (0, 1), (4, 2)),)}
    assert Arrangement((4, 4), tiles).rebuilt("y") is None
    tiles[2] = (Tile(((2, 4), (0, 3)), (0, 1), (2, 3)),)
    joined = "concat(concat(rank0.y, rank1.y[:2], dim=1), concat(rank2.y, rank1.y[2:, 1:], dim=1), dim=0)"
    assert Arrangement((4, 4), tiles).rebuilt("y") == joined
    runs = {0: (Tile(((3, 6),), (0,), (3,), flat=True),), 1: (Tile(((0, 3),), (0,), (1, 3), flat=True),)}
    assert Arrangement((2, 3), runs).rebuilt("y") == "concat(rank1.y.reshape(-1), rank0.y, dim=0).reshape(2, 3)"


# ---------------------------------------------------------------------- several tiles side by side
def zigzag(full, coord):
    parts = full.chunk(4)
    return torch.cat([parts[coord["cp"]], parts[3 - coord["cp"]]])


def stripes(full, coord):
    return full[coord["cp"] :: 2]


def fused(full, coord):
    return torch.cat([part.chunk(2)[coord["cp"]] for part in full.split([4, 2, 2])])


def uneven(full, coord):
    starts, ends = full[:5], full[5:]
    return torch.cat([starts[:3], ends[:1]] if coord["cp"] == 0 else [starts[3:], ends[1:]])


def turned_over(full, coord):
    parts = full.chunk(4)
    return torch.cat([parts[3 - coord["cp"]], parts[coord["cp"]]])


def one_twice(full, coord):
    return torch.cat([full.chunk(2)[coord["cp"]][:2], full.chunk(2)[coord["cp"]]])


def without_the_last(full, coord):
    return zigzag(full, coord)[:3]


def held_as(layout, **options):
    return gg.verify(torch.tanh, torch.tanh, mesh={"cp": 2}, inputs={"x": gg.Input((8, 3), local=layout)}, **options)


@pytest.mark.parametrize(
    ("layout", "expression"),
    [
        (zigzag, "concat(rank0.out[:2], rank1.out[:2], rank1.out[2:], rank0.out[2:], dim=0)"),
        (fused, "concat(rank0.out[:2], rank1.out[:2], rank0.out[2:3], rank1.out[2:3], rank0.out[3:], rank1.out[3:], dim=0)"),
        (uneven, "concat(rank0.out[:3], rank1.out[:2], rank0.out[3:], rank1.out[2:], dim=0)"),
        (stripes, "concat(rank0.out[:1], rank1.out[:1], rank0.out[1:2], rank1.out[1:2], rank0.out[2:3], rank1.out[2:3], "
                  "rank0.out[3:], rank1.out[3:], dim=0)"),
    ],
)  # fmt: skip
def test_several_tiles_side_by_side_are_proved_unless_another_relation_is_stated(layout, expression):
    free = held_as(layout)
    assert free.verified and str(free.relation) == f"out = {expression}"
    assert free.relation["out"].note == "out is made of tiles that no placement says: state outputs= to make that a fault"
    assert held_as(layout, outputs={"out": layout}).relation["out"].note is None
    stated = held_as(layout, outputs={"out": Shard(0)})
    assert stated.findings[0].message == f"out = {expression}, but Shard(0) is expected"
    assert stated.verdict == "refuted" and stated.counterexample is not None


@pytest.mark.parametrize("layout", [turned_over, one_twice, without_the_last])
def test_tiles_in_another_order_twice_or_with_something_left_out_are_refuted(layout):
    assert held_as(layout).verdict == "refuted"


def test_a_zigzag_that_is_gathered_and_not_put_back_in_order_is_refuted():
    def gathered(x):
        out = torch.empty(8, 3)
        dist.all_gather_into_tensor(out, torch.tanh(x))
        return out

    inputs = {"x": gg.Input((8, 3), local=zigzag)}
    assert gg.verify(torch.tanh, gathered, mesh={"cp": 2}, inputs=inputs).verdict == "refuted"


def test_tiles_side_by_side_on_a_mesh_of_two_axes():
    def layout(full, coord):
        return zigzag(full.chunk(2, 1)[coord["dp"]], coord)

    inputs = {"x": gg.Input((8, 4), local=layout)}
    report = gg.verify(torch.tanh, torch.tanh, mesh={"dp": 2, "cp": 2}, inputs=inputs)
    columns = (
        f"concat(rank{a}.out[{rows}], rank{a + 2}.out[{rows}], dim=1)"
        for a, rows in ((0, ":2"), (1, ":2"), (1, "2:"), (0, "2:"))
    )
    assert str(report.relation) == f"out = concat({', '.join(columns)}, dim=0)"


def test_where_there_is_no_proof_numbers_that_lie_side_by_side_refute_nothing():
    def dealt(x):
        parts = (2 * torch.sin(x) * torch.cos(x)).chunk(4)
        return torch.cat([parts[dist.get_rank()], parts[3 - dist.get_rank()]])

    report = gg.verify(lambda x: torch.sin(2 * x), dealt, mesh={"cp": 2}, inputs={"x": gg.Input((8, 3))})
    assert report.verdict == "unproven"
