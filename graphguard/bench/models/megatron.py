"""The same decoder on many ranks, in Megatron's style: tensor + sequence parallelism (tp) inside of stages (pp) of a pipeline
that runs 1F1B, data parallelism (dp) around it. Experts are split over dp, and each of them over tp. With context parallelism
(cp) the sequence is split before all else, and keys and values are gathered, as Llama 3 does.

Between attention and MLP a rank holds its part of the sequence; inside of them its heads, or its inner features, of all of it
that its cp has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from graphguard.bench.models import decoder
from graphguard.bench.models.decoder import Parameters, normed, of_layer
from graphguard.bench.models.regions import CrossEntropy, Exchange, Gather, ScatterSum, own_rows
from graphguard.bench.models.sizes import Sizes
from graphguard.capture.torch.front import TorchFrontEnd, functions
from graphguard.capture.torch.relation.inputs import Input

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)


class Held(NamedTuple):
    """A parameter: its shape, how tp and dp split it, and the layer that it is in."""

    shape: tuple[int, ...]
    tp: Placement = WHOLE
    dp: Placement = WHOLE
    layer: int | None = None

    @property
    def meets_own_tokens(self) -> bool:
        """Whether a rank shows it its part of the sequence alone, so that its gradient is a sum over tp."""
        return not self.tp.is_shard()


class Groups(NamedTuple):
    tp: Any
    dp: Any
    pp: Any
    cp: Any

    @staticmethod
    def of(mesh: DeviceMesh) -> Groups:
        return Groups(*(mesh.get_group(axis) if axis in mesh.mesh_dim_names else None for axis in Groups._fields))


@dataclass(frozen=True)
class Megatron:
    """Each rank of dp runs `microbatches` samples, one after the other."""

    sizes: Sizes
    tp: int = 1
    dp: int = 1
    pp: int = 1
    microbatches: int = 1
    cp: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, **({"cp": self.cp} if self.cp > 1 else {}), "tp": self.tp}

    # ------------------------------------------------------------------ parameters and inputs
    def held(self) -> dict[str, Held]:
        sizes = self.sizes
        found = {"embedding": Held((sizes.vocab, sizes.hidden), ROWS)}
        if not sizes.turns_positions:
            found["positions"] = Held((sizes.sequence, sizes.hidden))
        for layer in range(sizes.layers):
            for name, held in self._of_layer(layer):
                found[f"{name}{layer}"] = held._replace(layer=layer)
        found |= dict(self._norm("norm", sizes.hidden))
        return found | {"unembedding": Held((sizes.vocab, sizes.hidden), ROWS)}

    def _norm(self, name: str, size: int) -> Iterator[tuple[str, Held]]:
        yield name, Held((size,))
        if self.sizes.has_biases:
            yield f"{name}_bias", Held((size,))

    def _of_layer(self, layer: int) -> Iterator[tuple[str, Held]]:
        sizes = self.sizes
        yield from self._norm("attention_norm", sizes.hidden)
        yield from self._of_latent_attention() if sizes.latent else self._of_attention()
        if sizes.has_biases:
            yield "out_bias", Held((sizes.hidden,))
        yield from self._norm("mlp_norm", sizes.hidden)
        if sizes.has_experts(layer):
            yield from self._of_experts()
            return
        for name in ("gate", "up") if sizes.is_gated else ("up",):
            yield name, Held((sizes.inner, sizes.hidden), ROWS)
        yield "down", Held((sizes.hidden, sizes.inner), COLUMNS)
        if sizes.has_biases:
            yield from (("up_bias", Held((sizes.inner,), ROWS)), ("down_bias", Held((sizes.hidden,))))

    def _of_attention(self) -> Iterator[tuple[str, Held]]:
        sizes = self.sizes
        for name, heads in (("query", sizes.heads), ("key", sizes.groups), ("value", sizes.groups)):
            yield name, Held((heads * sizes.head, sizes.hidden), ROWS)
            if sizes.has_qkv_bias or sizes.has_biases:
                yield f"{name}_bias", Held((heads * sizes.head,), ROWS)
        yield "out", Held((sizes.hidden, sizes.heads * sizes.head), COLUMNS)

    def _of_latent_attention(self) -> Iterator[tuple[str, Held]]:
        sizes, latent = self.sizes, self.sizes.latent
        assert latent is not None
        yield "query_down", Held((latent.queries, sizes.hidden))
        yield "query_norm", Held((latent.queries,))
        yield "query", Held((sizes.heads * (latent.plain + latent.rope), latent.queries), ROWS)
        yield "key_down", Held((latent.keys + latent.rope, sizes.hidden))
        yield "key_norm", Held((latent.keys,))
        yield "key", Held((sizes.heads * (latent.plain + latent.values), latent.keys), ROWS)
        yield "out", Held((sizes.hidden, sizes.heads * latent.values), COLUMNS)

    def _of_experts(self) -> Iterator[tuple[str, Held]]:
        sizes, experts = self.sizes, self.sizes.experts
        assert experts is not None
        yield "router", Held((experts.count, sizes.hidden))
        for name in ("expert_gate", "expert_up"):
            yield name, Held((experts.count, sizes.hidden, experts.inner), Shard(2), ROWS)
        yield "expert_down", Held((experts.count, experts.inner, sizes.hidden), COLUMNS, ROWS)
        for name in ("shared_gate", "shared_up"):
            yield name, Held((experts.inner, sizes.hidden), ROWS)
        yield "shared_down", Held((sizes.hidden, experts.inner), COLUMNS)

    def stage_of(self, name: str, held: Held) -> int:
        """Layers are dealt evenly; what is left over goes to the stages in the middle, which have less to do."""
        if held.layer is None:
            return 0 if name in ("embedding", "positions") else self.pp - 1
        return next(stage for stage in range(self.pp) if held.layer < self._ends()[stage])

    def _ends(self) -> list[int]:
        each, rest = divmod(self.sizes.layers, self.pp)
        first = (self.pp - rest + 1) // 2
        sizes = [each + (first <= stage < first + rest) for stage in range(self.pp)]
        return [sum(sizes[: stage + 1]) for stage in range(self.pp)]

    def inputs(self) -> dict[str, Input]:
        shape = self.sizes.sequence, self.dp * self.microbatches
        ids = {name: Input(shape, dtype=torch.int64, low=0, high=self.sizes.vocab) for name in ("tokens", "target")}
        return ids | {name: Input(held.shape) for name, held in self.held().items()}

    def local_inputs(self, full: Parameters, coord: dict[str, Any]) -> Parameters:
        """A rank's part of its samples, and its parts of its stage's parameters."""
        stage = int(coord["pp"])
        local = {name: _part(full[name], COLUMNS, coord["dp"], self.dp) for name in ("tokens", "target")}
        if self.cp > 1:
            local = {name: _part(ids, ROWS, coord["cp"], self.cp) for name, ids in local.items()}
        for name, held in self.held().items():
            if self.stage_of(name, held) == stage:
                local[name] = _part(_part(full[name], held.dp, coord["dp"], self.dp), held.tp, coord["tp"], self.tp)
        return local

    def front(self) -> TorchFrontEnd:
        subject = functions(self.sequential, self.distributed, self.mesh, self.inputs(), self.local_inputs)
        return TorchFrontEnd(subject, self.expected())

    def expected(self) -> dict[str, Any]:
        """Each gradient is held as its parameter is."""
        return {f"grads.{name}": {"tp": held.tp, "dp": held.dp} for name, held in self.held().items()} | {"loss": Replicate()}

    # ------------------------------------------------------------------ the two programs
    def sequential(self, tokens: Tensor, target: Tensor, **params: Tensor) -> dict[str, Any]:
        return decoder.sequential(self.sizes, tokens, target, **params)

    def distributed(self, tokens: Tensor, target: Tensor, mesh: DeviceMesh, **params: Tensor) -> dict[str, Any]:
        groups, p = Groups.of(mesh), decoder.leaves(params)
        losses = OneForwardOneBackward(self, groups, p).run(tokens, target)
        held = self.held()
        grads = {name: self._synchronised(tensor.grad, held[name], groups) for name, tensor in p.items()}
        loss = None
        if losses:
            loss = _averaged(torch.stack(losses).sum(), groups.dp, groups.cp)
        return {"loss": loss, "grads": grads}

    def _synchronised(self, grad: Any, held: Held, groups: Groups) -> Tensor:
        if held.meets_own_tokens:
            dist.all_reduce(grad, group=groups.tp)
        if held.dp.is_shard():  # an expert has met the tokens of all ranks of dp
            return _averaged(grad / self.dp, groups.cp)
        return _averaged(grad, groups.dp, groups.cp)

    # ------------------------------------------------------------------ one stage
    def embedded(self, ids: Tensor, p: Parameters, groups: Groups) -> Tensor:
        x: Tensor = ScatterSum.apply(own_rows(ids, p["embedding"], groups.tp), groups.tp)
        if self.sizes.turns_positions:
            return x
        return x + p["positions"].narrow(0, dist.get_rank(groups.tp) * x.size(0), x.size(0)).unsqueeze(1)

    def run_layers(self, x: Tensor, p: Parameters, groups: Groups) -> Tensor:
        turn: Any = decoder.turning(self.sizes)
        if self.cp > 1:
            turn = tuple(_part(each, ROWS, dist.get_rank(groups.cp), self.cp) for each in turn)
        for layer in [int(name.removeprefix("query")) for name in p if name.startswith("query") and name[5:].isdigit()]:
            x = self.run_layer(x, of_layer(p, layer), layer, turn, groups)
        return x

    def run_layer(self, x: Tensor, p: Parameters, layer: int, turn: Any, groups: Groups) -> Tensor:
        inner = decoder.inner_of(self.sizes, normed(self.sizes, x, p, "attention_norm"), p)
        h = self.attention(Gather.apply(inner, groups.tp), p, turn, groups)
        x = x + self.left(h, p, "out", groups)
        h = normed(self.sizes, x, p, "mlp_norm")
        if self.sizes.has_experts(layer):
            return x + self.routed(h, p, groups)
        return x + self.left(decoder.mlp(self.sizes, Gather.apply(h, groups.tp), p), p, "down", groups)

    def attention(self, h: Tensor, p: Parameters, turn: Any, groups: Groups) -> Tensor:
        if self.cp == 1:
            return decoder.attention(self.sizes, h, p, turn)
        q, k, v = decoder.heads(self.sizes, h, p, turn)
        k, v = (Gather.apply(each.movedim(2, 0), groups.cp).movedim(0, 2) for each in (k, v))
        own = dist.get_rank(groups.cp) * h.size(0) + torch.arange(h.size(0))
        seen = own.unsqueeze(1) >= torch.arange(k.size(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=self.sizes.groups != self.sizes.heads)
        return y.permute(2, 0, 1, 3).flatten(2)

    def left(self, h: Tensor, p: Parameters, name: str, groups: Groups) -> Tensor:
        """What attention or MLP add, to the own part of the sequence."""
        y: Tensor = ScatterSum.apply(F.linear(h, p[name]), groups.tp)
        return y + p[f"{name}_bias"] if f"{name}_bias" in p else y

    def routed(self, h: Tensor, p: Parameters, groups: Groups) -> Tensor:
        """Tokens go to the ranks of dp that have their experts; there, all ranks of tp see them."""
        x = h.flatten(0, 1)
        gates = decoder.gated(self.sizes, x, p)
        rows = _exchanged(decoder.dispatched(gates, x), groups.dp)
        rows = Gather.apply(rows.transpose(0, 1), groups.tp).transpose(0, 1)
        rows = decoder.expert_mlp(rows, p)
        rows = ScatterSum.apply(rows.transpose(0, 1), groups.tp).transpose(0, 1)
        y = decoder.combined(gates, _exchanged_back(rows, groups.dp)).view_as(h)
        shared = decoder.mlp(self.sizes, Gather.apply(h, groups.tp), {"gate": p["shared_gate"], "up": p["shared_up"]})
        return y + self.left(shared, p, "shared_down", groups)

    def loss_of(self, x: Tensor, target: Tensor, p: Parameters, groups: Groups) -> Tensor:
        logits = F.linear(Gather.apply(normed(self.sizes, x, p, "norm"), groups.tp), p["unembedding"])
        return CrossEntropy.apply(logits, target, groups.tp).mean() / self.microbatches


def _part(x: Tensor, placement: Placement, place: Any, parts: int) -> Tensor:
    if not placement.is_shard():
        return x
    size = x.size(placement.dim) // parts
    return x.narrow(placement.dim, place * size, size)


def _averaged(x: Tensor, *groups: Any) -> Tensor:
    """Over the ranks that meet other tokens."""
    for group in groups:
        if group is not None:
            dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group)
    return x


def _exchanged(rows: Tensor, group: Any) -> Tensor:
    """[expert, own token, hidden] -> [own expert, token of any rank, hidden]."""
    rows = Exchange.apply(rows, group).unflatten(0, (dist.get_world_size(group), -1))
    return rows.transpose(0, 1).flatten(1, 2)


def _exchanged_back(rows: Tensor, group: Any) -> Tensor:
    rows = rows.unflatten(1, (dist.get_world_size(group), -1)).transpose(0, 1).flatten(0, 1)
    return Exchange.apply(rows, group)


class OneForwardOneBackward:
    """The schedule of one stage: a forward for each stage behind it, then one of each in turn, then the backwards left."""

    def __init__(self, model: Megatron, groups: Groups, p: Parameters):
        self.model, self.groups, self.p = model, groups, p
        self.stage, self.stages = dist.get_rank(groups.pp), dist.get_world_size(groups.pp)
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        self.in_flight: deque[tuple[Tensor | None, Tensor]] = deque()
        self.sends: list[Any] = []
        self.losses: list[Tensor] = []

    def run(self, tokens: Tensor, target: Tensor) -> list[Tensor]:
        count = self.model.microbatches
        todo = zip(tokens.chunk(count, 1), target.chunk(count, 1), strict=True)
        ahead = min(int(self.stages - self.stage - 1), count)
        for _ in range(ahead):
            self.forward(*next(todo))
        for ids, wanted in todo:
            self.forward(ids, wanted)
            self.backward()
        for _ in range(ahead):
            self.backward()
        for work in self.sends:
            work.wait()
        return self.losses

    def forward(self, ids: Tensor, wanted: Tensor) -> None:
        model, p, groups = self.model, self.p, self.groups
        received = None
        if self.is_first:
            x = model.embedded(ids, p, groups)
        else:
            received = torch.empty(ids.size(0) // dist.get_world_size(groups.tp), ids.size(1), model.sizes.hidden)
            dist.recv(received, group=groups.pp, group_src=self.stage - 1)
            x = received.requires_grad_()
        x = model.run_layers(x, p, groups)
        if self.is_last:
            x = model.loss_of(x, wanted, p, groups)
            self.losses.append(x.detach())
        else:
            self.sends.append(dist.isend(x.detach(), group=groups.pp, group_dst=self.stage + 1))
        self.in_flight.append((received, x))

    def backward(self) -> None:
        received, x = self.in_flight.popleft()
        if self.is_last:
            x.backward()
        else:
            grad = torch.empty_like(x)
            dist.recv(grad, group=self.groups.pp, group_src=self.stage + 1)
            x.backward(grad)
        if received is not None:
            self.sends.append(dist.isend(received.grad, group=self.groups.pp, group_dst=self.stage - 1))
