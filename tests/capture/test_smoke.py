import torch
import torch.distributed as dist
from harness import assert_replays_as_eager, assert_replays_as_gloo

from graphguard import Input, Shard


def test_mlp_replays_bit_for_bit():
    def mlp(x, a, b):
        return torch.relu(x @ a) @ b

    graph = assert_replays_as_eager(mlp, {"x": Input((8, 16)), "a": Input((16, 64)), "b": Input((64, 16))})
    assert [node.op for node in graph.nodes] == ["aten.mm.default", "aten.relu.default", "aten.mm.default"]


def test_tensor_parallel_mlp_replays_as_gloo():
    def mlp(x, a, b):
        y = torch.relu(x @ a) @ b
        dist.all_reduce(y)
        return y

    f64 = torch.float64
    inputs = {"x": Input((8, 16), dtype=f64), "a": Input((16, 64), Shard(1), f64), "b": Input((64, 16), Shard(0), f64)}
    assert_replays_as_gloo(mlp, 4, inputs)
