"""Placements: as values, in print, as tiles."""

import pytest
import torch
from torch.distributed.tensor import placement_types as torchs

from graphguard.capture.torch.relation.inputs import placement_of
from graphguard.graph.ir import Mesh
from graphguard.graph.placement import (
    REPLICATE,
    SUM,
    Partial,
    Shard,
    StridedShard,
    candidates,
    on_mesh,
    parse,
    piece,
    read,
    spans_of,
    type_text,
)

DP_TP = Mesh.of({"dp": 2, "tp": 3})
OF_TORCH = [
    (torchs.Replicate(), REPLICATE, "Replicate"),
    (torchs.Shard(0), Shard(0), "Shard(0)"),
    (torchs.Shard(-1), Shard(-1), "Shard(-1)"),
    (torchs.Partial(), SUM, "Partial(sum)"),
    (torchs.Partial("avg"), Partial("avg"), "Partial(avg)"),
]


# ---------------------------------------------------------------------- read and written
@pytest.mark.parametrize(("given", "placement", "text"), OF_TORCH)
def test_a_placement_is_written_as_torch_and_as_a_report_does_and_read_from_both(given, placement, text):
    assert (repr(placement), str(placement)) == (repr(given), text)
    assert placement_of(given) == read(repr(given)) == read(text) == placement
    assert parse([text]) == (placement,)


def test_a_strided_shard_is_no_placement_of_a_relation():
    strided = torchs._StridedShard(0, split_factor=2)
    assert repr(StridedShard(0, 2)) == repr(strided) and read(repr(strided)) == StridedShard(0, 2)
    assert placement_of(strided) is None
    with pytest.raises(ValueError, match=r"^'_StridedShard\(dim=0, sf=2\)' is not the placement of a relation$"):
        parse(["Replicate", repr(strided)])


@pytest.mark.parametrize("text", ["", "Shard", "Shard()", "Shard(x)", "Shard(1) ", "Partial()", "_NormPartial(2)", "replicate"])
def test_what_is_no_placement_is_not_read_as_one(text):
    assert read(text) is None
    with pytest.raises(ValueError, match="is not the placement of a relation"):
        parse([text])


@pytest.mark.parametrize("item", [None, "Shard(0)", 3, torchs.Shard, object()])
def test_what_torch_does_not_call_a_placement_is_none(item):
    assert placement_of(item) is None


def test_kinds_are_never_equal():
    assert len({REPLICATE, SUM, Shard(0), Shard(1), StridedShard(0, 1), Partial("max")}) == 6


# ---------------------------------------------------------------------- tiles
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [0, 1, 4, 5, 6, 7, 12])
def test_pieces_are_those_of_torch_chunk_and_then_empty(size, count):
    whole = torch.arange(size)
    chunks = whole.chunk(count) if size else ()  # of nothing, torch.chunk makes one piece
    pieces = [whole[slice(*piece(size, index, count))] for index in range(count)]
    assert [p.tolist() for p in pieces[: len(chunks)]] == [c.tolist() for c in chunks]
    assert not any(len(p) for p in pieces[len(chunks) :])


def test_axes_that_shard_one_dim_nest_left_to_right():
    whole = torch.arange(55).reshape(11, 5)
    for lane in range(DP_TP.size):
        dp, tp = divmod(lane, 3)
        rows = spans_of((11, 5), DP_TP, (Shard(0), Shard(0)), lane)
        assert torch.equal(whole[slice(*rows[0]), slice(*rows[1])], whole.chunk(2)[dp].chunk(3)[tp])
        grid = spans_of((11, 5), DP_TP, (Shard(1), Shard(0)), lane)
        assert torch.equal(whole[slice(*grid[0]), slice(*grid[1])], whole.chunk(2, 1)[dp].chunk(3)[tp])


def test_copies_and_summands_span_the_whole():
    assert {spans_of((7, 5), DP_TP, (REPLICATE, SUM), lane) for lane in range(6)} == {((0, 7), (0, 5))}


# ---------------------------------------------------------------------- on a mesh
def test_candidates_without_sums_come_first_and_those_that_cut_least():
    found = candidates(1, DP_TP)
    assert found == [
        (REPLICATE, REPLICATE), (REPLICATE, Shard(0)), (Shard(0), REPLICATE), (Shard(0), Shard(0)),
        (REPLICATE, SUM), (SUM, REPLICATE), (Shard(0), SUM), (SUM, Shard(0)), (SUM, SUM),
    ]  # fmt: skip
    assert candidates(1, DP_TP, sums=False) == found[:4]


def test_along_an_axis_of_one_rank_nothing_is_placed():
    mesh = Mesh.of({"dp": 1, "tp": 2})
    assert candidates(0, mesh) == [(REPLICATE, REPLICATE), (REPLICATE, SUM)]
    assert on_mesh((Shard(0), Shard(0)), mesh) == (REPLICATE, Shard(0))


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((REPLICATE, REPLICATE), "f32[8, 64]"),
        ((REPLICATE, Shard(1)), "f32[8, 64@tp]"),
        ((Shard(0), Shard(0)), "f32[8@dp@tp, 64]"),
        ((Shard(0), Partial("avg")), "f32[8@dp, 64] avg@tp"),
        ((SUM, SUM), "f32[8, 64] partial@dp,tp"),
    ],
)
def test_a_type_says_what_is_cut_and_what_is_a_summand(placements, text):
    assert type_text("float32", (8, 64), DP_TP, placements) == text


def test_a_cut_over_one_rank_is_not_shown():
    assert type_text("bfloat16", (8,), Mesh.of({"tp": 1}), (Shard(0),)) == "bf16[8]"
