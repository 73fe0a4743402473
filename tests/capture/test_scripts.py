"""Scripts as they are: those that start and end torch.distributed themselves."""

import pytest
import torch.distributed as dist
from torch.distributed import destroy_process_group, init_process_group

import graphguard as gg
from graphguard import CaptureError, Shard

STARTS = "the program starts and ends torch.distributed itself: its ranks are those of the mesh"


def error(x, w):
    return (x @ w).square().mean()


def script(divided, **world):
    def program(x, w):
        init_process_group("nccl", **world)
        loss = error(x, w)
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size() if divided else loss
        destroy_process_group()
        return loss

    return program


def verify(program, size=2):
    inputs = {"x": gg.Input((8, 3), Shard(0)), "w": gg.Input((3,))}
    return gg.verify(error, program, mesh={"dp": size}, inputs=inputs)


@pytest.mark.parametrize("size", [2, 8])
def test_a_script_that_starts_and_ends_torch_distributed_has_the_ranks_of_the_mesh(size):
    report = verify(script(True, world_size=size), size)
    assert report.verified and STARTS in report.assumptions
    assert verify(script(False), size).verdict == "refuted"


def test_a_world_of_another_size_is_told():
    with pytest.raises(CaptureError, match=r"torch\.distributed with world_size=4, and the mesh has world_size=2 here"):
        verify(script(True, world_size=4))


def test_a_rank_of_its_own_is_told():
    with pytest.raises(CaptureError, match=r"torch\.distributed with rank=0, and the mesh has rank=1 here"):
        verify(script(True, rank=0))


def test_what_communicates_after_the_end_or_starts_again_is_refused():
    def late(x, w):
        destroy_process_group()
        loss = error(x, w)
        dist.all_reduce(loss)
        return loss / 2

    def again(x, w):
        init_process_group("nccl")
        init_process_group("nccl")
        return error(x, w)

    with pytest.raises(CaptureError, match=r"communicates after it has ended torch\.distributed"):
        verify(late)
    with pytest.raises(CaptureError, match=r"initialises torch\.distributed again"):
        verify(again)
