"""Context parallelism: the sequence is split over the ranks, and attention brings queries to keys or keys to queries."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from cases.regions import gather_first, reduce_scatter_first
from graphguard import Input, Shard

BATCH, HEADS, SEQUENCE, HEAD = 2, 2, 8, 4
SCALE = 1 / math.sqrt(HEAD)
WINDOW = 3


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


def with_gradients(out, dy, q, k, v):
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dy)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


# ---------------------------------------------------------------------- the sequential programs
def weighted(q, k, v, mask=None):
    scores = q @ k.transpose(-1, -2) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


def causal_mask(queries, keys):
    return queries[:, None] >= keys[None, :]


def window_mask(queries, keys):
    distance = queries[:, None] - keys[None, :]
    return (distance >= 0) & (distance < WINDOW)


def window_mask_of_its_own(queries, keys):
    """One rank has the two conditions in the other order, so that its program is not that of the others."""
    distance = queries[:, None] - keys[None, :]
    if dist.get_rank() == 1:
        return (distance < WINDOW) & (distance >= 0)
    return (distance >= 0) & (distance < WINDOW)


def full_forward(q, k, v):
    return weighted(q, k, v)


def causal_forward(q, k, v):
    positions = torch.arange(q.size(-2))
    return weighted(q, k, v, causal_mask(positions, positions))


def full_step(q, k, v, dy):
    q, k, v = leaves(q, k, v)
    return with_gradients(weighted(q, k, v), dy, q, k, v)


def masked_step(mask):
    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        positions = torch.arange(q.size(-2))
        return with_gradients(weighted(q, k, v, mask(positions, positions)), dy, q, k, v)

    return step


causal_step, window_step = masked_step(causal_mask), masked_step(window_mask)


def fused_causal_step(q, k, v, dy):
    q, k, v = leaves(q, k, v)
    return with_gradients(F.scaled_dot_product_attention(q, k, v, is_causal=True), dy, q, k, v)


# ---------------------------------------------------------------------- how keys and values go around
def rotated(tensor):
    """To the next rank, from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor.contiguous(), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    return received


def rotated_in_a_batch(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def rotated_by_parity(tensor):
    """Even ranks send first, odd ones receive first, so that nothing waits."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor.contiguous(), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
    else:
        dist.recv(received, (rank - 1) % size)
        dist.send(tensor.contiguous(), (rank + 1) % size)
    return received


def around(rotate):
    """The blocks of keys and values that come by, with the rank that they are from."""

    def blocks(k, v):
        rank, size = dist.get_rank(), dist.get_world_size()
        for step in range(size):
            yield (rank - step) % size, k, v
            if step < size - 1:
                k, v = rotate(k), rotate(v)

    return blocks


def together(k, v):
    """The same blocks in the same order, out of one all-gather."""
    rank, size = dist.get_rank(), dist.get_world_size()
    both = torch.stack([k, v])
    parts = [torch.empty_like(both) for _ in range(size)]
    dist.all_gather(parts, both)
    for step in range(size):
        source = (rank - step) % size
        yield source, *parts[source].unbind(0)


RINGS = {"p2p": around(rotated), "batched": around(rotated_in_a_batch), "parity": around(rotated_by_parity), "gather": together}


# ---------------------------------------------------------------------- online softmax
class Online:
    """Sums of exponentials, shifted by the largest score so far."""

    def __init__(self):
        self.largest = self.total = self.out = None

    def add(self, scores, v):
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total, out = weights.sum(-1, keepdim=True), weights @ v
        if self.out is not None:
            both = torch.maximum(self.largest, largest)
            old, new = (self.largest - both).exp(), (largest - both).exp()
            largest, total, out = both, self.total * old + total * new, self.out * old + out * new
        self.largest, self.total, self.out = largest, total, out

    def result(self):
        return self.out / self.total


class OnlineByLog:
    """Each block is attended on its own; blocks are weighed by their log-sum-exp."""

    def __init__(self):
        self.log = self.out = None

    def add(self, scores, v):
        log, out = scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ v
        if self.out is not None:
            both = torch.logaddexp(self.log, log)
            out = (self.log - both).exp() * self.out + (log - both).exp() * out
            log = both
        self.log, self.out = log, out

    def result(self):
        return self.out


class OnlineBySigmoid(OnlineByLog):
    """As ring-flash-attention writes it."""

    def add(self, scores, v):
        log, out = scores.logsumexp(-1, keepdim=True), scores.softmax(-1) @ v
        if self.out is not None:
            out = self.out - torch.sigmoid(log - self.log) * (self.out - out)
            log = self.log - F.logsigmoid(self.log - log)
        self.log, self.out = log, out


class OnlineFromNothing(Online):
    """Starts from sums of nothing: minus infinity and zeros."""

    def add(self, scores, v):
        if self.out is None:
            self.largest = torch.full_like(scores[..., :1], float("-inf"))
            self.total, self.out = torch.zeros_like(scores[..., :1]), torch.zeros_like(scores[..., :1] * v[..., :1, :])
        super().add(scores, v)


def ring(blocks, online=Online):
    def forward(q, k, v):
        state = online()
        for _, key, value in blocks(k, v):
            state.add(q @ key.transpose(-1, -2) * SCALE, value)
        return state.result()

    return forward


def causal_ring(blocks, online=Online):
    """Blocks of later ranks are skipped, the rank's own has the diagonal."""

    def forward(q, k, v):
        rank, state = dist.get_rank(), online()
        for source, key, value in blocks(k, v):
            if source > rank:
                continue
            scores = q @ key.transpose(-1, -2) * SCALE
            if source == rank:
                positions = torch.arange(q.size(-2))
                scores = scores.masked_fill(~causal_mask(positions, positions), float("-inf"))
            state.add(scores, value)
        return state.result()

    return forward


# ---------------------------------------------------------------------- a ring with its own backward
def mask_of(source, rows, columns):
    """The causal mask of a block, None where all of it is seen; and whether any of it is."""
    rank = dist.get_rank()
    positions = torch.arange(rows)
    return (None if source < rank else causal_mask(positions, positions)), source <= rank


class RingAttention(torch.autograd.Function):
    """Keys and values go around; in the backward their gradients go with them, and come home after one more step."""

    @staticmethod
    def forward(ctx, q, k, v, causal, rotate):
        state = OnlineByLog()
        for source, key, value in around(rotate)(k, v):
            mask, seen = mask_of(source, q.size(-2), k.size(-2)) if causal else (None, True)
            if seen:
                scores = q @ key.transpose(-1, -2) * SCALE
                state.add(scores if mask is None else scores.masked_fill(~mask, float("-inf")), value)
        ctx.save_for_backward(q, k, v, state.out, state.log)
        ctx.causal, ctx.rotate = causal, rotate
        return state.out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log = ctx.saved_tensors
        size = dist.get_world_size()
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(size):
            source = (dist.get_rank() - step) % size
            mask, seen = mask_of(source, q.size(-2), k.size(-2)) if ctx.causal else (None, True)
            if seen:
                scores = q @ k.transpose(-1, -2) * SCALE
                p = ((scores if mask is None else scores.masked_fill(~mask, float("-inf"))) - log).exp()
                dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
                dq = dq + dscores @ k
                dk = dk + dscores.transpose(-1, -2) @ q
                dv = dv + p.transpose(-1, -2) @ dout
            k, v, dk, dv = (ctx.rotate(each) for each in (k, v, dk, dv))
        return dq, dk, dv, None, None


def ring_step(causal, rotate=rotated, attention=RingAttention):
    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        return with_gradients(attention.apply(q, k, v, causal, rotate), dy, q, k, v)

    return step


# ---------------------------------------------------------------------- all keys and values are gathered
class GatherSequence(torch.autograd.Function):
    """Gathers dim 2; the gradients are summed and scattered."""

    @staticmethod
    def forward(ctx, x):
        return gather_first(x.movedim(2, 0), None).movedim(0, 2)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter_first(grad.movedim(2, 0), None).movedim(0, 2)


def own_positions(length):
    return dist.get_rank() * length + torch.arange(length)


def gathered_step(mask=None, gather=GatherSequence, positions=own_positions):
    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        keys, values = gather.apply(k), gather.apply(v)
        seen = None if mask is None else mask(positions(q.size(2)), torch.arange(keys.size(2)))
        return with_gradients(weighted(q, keys, values, seen), dy, q, k, v)

    return step


# ---------------------------------------------------------------------- Ulysses
def exchanged(x, cut, join):
    """All-to-all: `cut` is split over the ranks, and `join` is put together."""
    size = dist.get_world_size()
    sent = [part.contiguous() for part in x.chunk(size, cut)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received, join)


def exchanged_in_one(x, cut, join):
    """The same with one buffer."""
    size = dist.get_world_size()
    sent = torch.stack(x.chunk(size, cut)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return torch.cat(received.unbind(0), join)


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, join, exchange):
        ctx.back = join, cut, exchange
        return exchange(x, cut, join)

    @staticmethod
    def backward(ctx, grad):
        cut, join, exchange = ctx.back
        return exchange(grad, cut, join), None, None, None


def ulysses_step(exchange=exchanged, back=(2, 1)):
    """Heads are split while the sequence is whole."""

    def step(q, k, v, dy):
        q, k, v = leaves(q, k, v)
        whole = [Exchange.apply(x, 1, 2, exchange) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*whole, is_causal=True)
        return with_gradients(Exchange.apply(out, *back, exchange), dy, q, k, v)

    return step


# ---------------------------------------------------------------------- a sliding window needs the neighbour's end only
def windowed_forward(q, k, v):
    positions = torch.arange(q.size(2))
    return weighted(q, k, v, window_mask(positions, positions))


def halo(x, width):
    """The end of the rank before, in front of the rank's own part; the first rank has none."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sending = dist.isend(x[:, :, -width:].contiguous(), rank + 1) if rank < size - 1 else None
    if rank == 0:
        before = x[:, :, :0]
    else:
        before = torch.empty_like(x[:, :, :width])
        dist.recv(before, rank - 1)
    if sending is not None:
        sending.wait()
    return torch.cat([before, x], 2)


def windowed_with_halo(width=WINDOW - 1):
    def forward(q, k, v):
        keys, values = halo(k, width), halo(v, width)
        mine = own_positions(q.size(2))
        return weighted(q, keys, values, window_mask(mine, mine[-1] + 1 - keys.size(2) + torch.arange(keys.size(2))))

    return forward


# ---------------------------------------------------------------------- faults
class OnlineWithoutRescaling(Online):
    def add(self, scores, v):
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total, out = weights.sum(-1, keepdim=True), weights @ v
        if self.out is not None:
            total, out = self.total + total, self.out + out  # fault: sums of different shifts are added
        self.largest, self.total, self.out = largest, total, out


class OnlineOfMeans(OnlineByLog):
    def add(self, scores, v):
        out = scores.softmax(-1) @ v
        self.out = out if self.out is None else (self.out + out) / 2  # fault: blocks count alike, whatever they weigh


def stale_values(k, v):
    """The keys go around."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size):
        yield (rank - step) % size, k, v
        if step < size - 1:
            k = rotated(k)  # fault: the values stay where they are


def one_step_short(k, v):
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size - 1):  # fault: the last block never comes
        yield (rank - step) % size, k, v
        k, v = rotated(k), rotated(v)


def named_backwards(k, v):
    """The blocks come from the ranks before, and are said to come from those behind."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size):
        yield (rank + step) % size, k, v  # fault: the block is not from there
        if step < size - 1:
            k, v = rotated(k), rotated(v)


class RingWithoutHomecoming(RingAttention):
    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, log = ctx.saved_tensors
        size = dist.get_world_size()
        delta = (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step in range(size):
            p = (q @ k.transpose(-1, -2) * SCALE - log).exp()
            dscores = p * (dout @ v.transpose(-1, -2) - delta) * SCALE
            dq = dq + dscores @ k
            dk = dk + dscores.transpose(-1, -2) @ q
            dv = dv + p.transpose(-1, -2) @ dout
            if step < size - 1:
                k, v, dk, dv = (ctx.rotate(each) for each in (k, v, dk, dv))  # fault: the gradients do not come home
        return dq, dk, dv, None, None


class RingWithoutDelta(RingAttention):
    @staticmethod
    def backward(ctx, dout):
        q, k, v, _, log = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for _ in range(dist.get_world_size()):
            p = (q @ k.transpose(-1, -2) * SCALE - log).exp()
            dp = dout @ v.transpose(-1, -2)
            dscores = p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE  # fault: the mean over one block only
            dq = dq + dscores @ k
            dk = dk + dscores.transpose(-1, -2) @ q
            dv = dv + p.transpose(-1, -2) @ dout
            k, v, dk, dv = (ctx.rotate(each) for each in (k, v, dk, dv))
        return dq, dk, dv, None, None


class GatherWithSlicedGradient(GatherSequence):
    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]  # fault: the gradient is sliced, not reduced


def local_positions(length):
    return torch.arange(length)  # fault: positions start at 0 on every rank


def exchanged_backwards(x, cut, join):
    size = dist.get_world_size()
    sent = [part.contiguous() for part in x.chunk(size, cut)]
    received = [torch.empty_like(part) for part in sent]
    dist.all_to_all(received, sent)
    return torch.cat(received[::-1], join)  # fault: heads come back in another order


# ---------------------------------------------------------------------- cases
SPLIT = {"cp": Shard(2)}
ALL_SPLIT = {"out": SPLIT, "dq": SPLIT, "dk": SPLIT, "dv": SPLIT}


def attention_inputs(placed, heads=HEADS, sequence=SEQUENCE, step=True):
    names = ("q", "k", "v", "dy") if step else ("q", "k", "v")
    return {name: Input((BATCH, heads, sequence, HEAD), **placed) for name in names}


def forward(name, distributed, size, sequential=full_forward, least=2):
    """least: how many positions a rank has at least."""
    inputs = attention_inputs({"placement": Shard(2)}, sequence=max(SEQUENCE, least * size), step=False)
    return Case(f"context-{name}", sequential, distributed, {"cp": size}, inputs, {"out": SPLIT})


def stepped(name, sequential, distributed, size, heads=HEADS):
    inputs = attention_inputs({"placement": Shard(2)}, heads, max(SEQUENCE, 2 * size))
    return Case(f"context-{name}", sequential, distributed, {"cp": size}, inputs, ALL_SPLIT)


def correct(size):
    onlines = {"log": OnlineByLog, "sigmoid": OnlineBySigmoid, "from-nothing": OnlineFromNothing}
    return [
        *[forward(f"ring-{way}-{size}", ring(blocks), size) for way, blocks in RINGS.items()],
        *[forward(f"ring-{way}-{size}", ring(RINGS["batched"], online), size) for way, online in onlines.items()],
        *[forward(f"ring-causal-{way}-{size}", causal_ring(RINGS[way]), size, causal_forward) for way in ("p2p", "gather")],
        forward(f"ring-causal-log-{size}", causal_ring(RINGS["p2p"], OnlineByLog), size, causal_forward),
        stepped(f"ring-step-{size}", full_step, ring_step(False), size),
        stepped(f"ring-step-causal-{size}", causal_step, ring_step(True), size),
        stepped(f"ring-step-batched-{size}", full_step, ring_step(False, rotated_in_a_batch), size),
        stepped(f"gathered-{size}", full_step, gathered_step(), size),
        stepped(f"gathered-causal-{size}", causal_step, gathered_step(causal_mask), size),
        stepped(f"gathered-window-{size}", window_step, gathered_step(window_mask), size),
        stepped(f"gathered-own-window-{size}", window_step, gathered_step(window_mask_of_its_own), size),
        stepped(f"ulysses-{size}", fused_causal_step, ulysses_step(), size, heads=4),
        stepped(f"ulysses-one-buffer-{size}", fused_causal_step, ulysses_step(exchanged_in_one), size, heads=4),
        forward(f"window-halo-{size}", windowed_with_halo(), size, windowed_forward),
    ]


def on_eight():
    """Two positions on each rank."""
    return [
        forward("ring-batched-8", ring(RINGS["batched"]), 8),
        forward("ring-causal-p2p-8", causal_ring(RINGS["p2p"]), 8, causal_forward),
        forward("ring-causal-log-8", causal_ring(RINGS["p2p"], OnlineByLog), 8, causal_forward),
        stepped("ring-step-8", full_step, ring_step(False), 8),
        stepped("ring-step-causal-8", causal_step, ring_step(True), 8),
        stepped("gathered-causal-8", causal_step, gathered_step(causal_mask), 8),
        stepped("ulysses-8", fused_causal_step, ulysses_step(), 8, heads=8),
    ]


def faults():
    two, causal = forward("", None, 2), forward("", None, 4, causal_forward)
    step, gathered = stepped("", full_step, None, 2), stepped("", causal_step, None, 2)
    heads = stepped("", fused_causal_step, None, 2, heads=4)
    ring_blocks = RINGS["p2p"]
    seeded = [
        (two, "not-rescaled", ring(ring_blocks, OnlineWithoutRescaling), "sums of different shifts are added"),
        (two, "mean-of-blocks", ring(ring_blocks, OnlineOfMeans), "blocks count alike, whatever they weigh"),
        (two, "stale-values", ring(stale_values), "the values stay where they are"),
        (two, "one-step-short", ring(one_step_short), "the last block never comes"),
        (causal, "named-backwards", causal_ring(named_backwards), "the block is not from there"),
        (step, "no-homecoming", ring_step(False, attention=RingWithoutHomecoming), "the gradients do not come home"),
        (step, "mean-of-one-block", ring_step(False, attention=RingWithoutDelta), "the mean over one block only"),
        (step, "sliced", gathered_step(None, GatherWithSlicedGradient), "the gradient is sliced, not reduced"),
        (gathered, "local-mask", gathered_step(causal_mask, positions=local_positions), "positions start at 0 on every rank"),
        (heads, "ulysses", ulysses_step(exchanged_backwards), "heads come back in another order"),
    ]
    return [faulty(case, f"context-fault-{name}", program, fault, stated=("*",)) for case, name, program, fault in seeded]


CASES = [*[case for size in (2, 4) for case in correct(size)], *on_eight(), *faults()]
