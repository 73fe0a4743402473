"""Pipeline parallelism: stages that pass activations on and gradients back, microbatch by microbatch."""

from collections import deque

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.case import Case, faulty
from graphguard import Input, Shard

LAYERS, WIDTH, FEATURES, CLASSES, BATCH, MICROBATCHES = 4, 4, 3, 5, 8, 4


def blocks(x, w, b):
    for weight, bias in zip(w, b, strict=True):
        x = x + torch.tanh(F.linear(x, weight, bias))
    return x


def leaves(*tensors):
    return [tensor.detach().requires_grad_() for tensor in tensors]


# ---------------------------------------------------------------------- the sequential programs
def squared_step(x, target, proj, w, b, head):
    proj, w, b, head = leaves(proj, w, b, head)
    loss = F.mse_loss(blocks(x @ proj, w, b) @ head, target)
    loss.backward()
    return {"loss": loss.detach(), "proj": proj.grad, "w": w.grad, "b": b.grad, "head": head.grad}


def summed_step(x, target, proj, w, b, head):
    proj, w, b, head = leaves(proj, w, b, head)
    loss = (blocks(x @ proj, w, b) @ head - target).square().sum()
    loss.backward()
    return {"loss": loss.detach(), "proj": proj.grad, "w": w.grad, "b": b.grad, "head": head.grad}


# ---------------------------------------------------------------------- one stage
class Stage:
    """What a rank does with one microbatch. `send` and `receive` are given the peer, and may be replaced."""

    def __init__(self, w, b, scale=1 / MICROBATCHES, **ends):
        self.rank, self.last_rank = dist.get_rank(), dist.get_world_size() - 1
        self.first, self.last = self.rank == 0, self.rank == self.last_rank
        self.w, self.b = leaves(w, b)
        self.ends = dict(zip(ends, leaves(*ends.values()), strict=True))
        self.scale = scale
        self.in_flight = deque()
        self.sends = []
        self.loss = torch.zeros(())

    # the ends
    def enter(self, x):
        return x @ self.ends["proj"]

    def error(self, h, target):
        return F.mse_loss(h @ self.ends["head"], target)

    # the wires
    def send(self, tensor, peer):
        self.sends.append(dist.isend(tensor.contiguous(), peer))

    def receive(self, shape, peer):
        buffer = torch.empty(shape)
        dist.recv(buffer, peer)
        return buffer

    def finish(self):
        for work in self.sends:
            work.wait()

    # one microbatch
    def run(self, x, h, target):
        """The stage's own forward: from what was received, to what is sent or to the loss."""
        received = None if self.first else h.requires_grad_()
        out = blocks(self.enter(x) if self.first else received, self.w, self.b)
        if self.last:
            out = self.error(out, target) * self.scale
            self.loss = self.loss + out.detach()
        self.in_flight.append((received, out))
        return out.detach()

    def unroll(self, grad):
        """The stage's own backward: the gradient that is sent."""
        received, out = self.in_flight.popleft()
        out.backward(None if self.last else grad)
        return None if self.first else received.grad

    def hidden(self, x):
        return (*x.shape[:1], WIDTH)

    def forward(self, x, target):
        out = self.run(x, None if self.first else self.receive(self.hidden(x), self.rank - 1), target)
        if not self.last:
            self.send(out, self.rank + 1)

    def backward(self, x):
        grad = self.unroll(None if self.last else self.receive(self.hidden(x), self.rank + 1))
        if not self.first:
            self.send(grad, self.rank - 1)

    def outputs(self):
        return {
            "loss": self.loss if self.last else None,
            "proj": self.ends["proj"].grad if self.first else None,
            "w": self.w.grad,
            "b": self.b.grad,
            "head": self.ends["head"].grad if self.last else None,
        }


class BackwardsStage(Stage):
    """The last microbatch is taken back first, on all stages."""

    def unroll(self, grad):
        received, out = self.in_flight.pop()
        out.backward(None if self.last else grad)
        return None if self.first else received.grad


class BlockingStage(Stage):
    def send(self, tensor, peer):
        dist.send(tensor, peer)


# ---------------------------------------------------------------------- the orders
def gpipe(stage, x, target):
    """All forwards, then all backwards."""
    for each, wanted in zip(x, target, strict=True):
        stage.forward(each, wanted)
    for each in x:
        stage.backward(each)
    stage.finish()
    return stage.outputs()


def one_forward_one_backward(stage, x, target):
    warmup = min(stage.last_rank - stage.rank, len(x))
    forwards, backwards = iter(zip(x, target, strict=True)), iter(x)
    for _ in range(warmup):
        stage.forward(*next(forwards))
    for _ in range(len(x) - warmup):
        stage.forward(*next(forwards))
        stage.backward(next(backwards))
    for _ in range(warmup):
        stage.backward(next(backwards))
    stage.finish()
    return stage.outputs()


def paired(stage, x, target):
    """1F1B whose steady state sends one way and receives the other in one batch, as Megatron does."""
    ahead, behind = stage.rank + 1, stage.rank - 1
    size = stage.hidden(x[0])

    def exchange(tensor, peer):
        buffer = torch.empty(size)
        operations = [dist.P2POp(dist.isend, tensor.contiguous(), peer), dist.P2POp(dist.irecv, buffer, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return buffer

    def receive(peer):
        buffer = torch.empty(size)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, buffer, peer)]):
            work.wait()
        return buffer

    def send(tensor, peer):
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor.contiguous(), peer)]):
            work.wait()

    warmup = min(stage.last_rank - stage.rank, len(x))
    steady = len(x) - warmup
    for number in range(warmup):
        out = stage.run(x[number], None if stage.first else receive(behind), target[number])
        send(out, ahead)
    h = None if stage.first or not steady else receive(behind)
    for number in range(steady):
        out = stage.run(x[warmup + number], h, target[warmup + number])
        grad = stage.unroll(None if stage.last else exchange(out, ahead))
        if not stage.first:
            if number == steady - 1:
                send(grad, behind)
            else:
                h = exchange(grad, behind)
    for _ in range(warmup):
        grad = stage.unroll(receive(ahead))
        if not stage.first:
            send(grad, behind)
    return stage.outputs()


def pipelined(order, stage=Stage, microbatches=MICROBATCHES, **options):
    def step(x, target, proj, w, b, head):
        options.setdefault("scale", 1 / microbatches)
        return order(stage(w, b, proj=proj, head=head, **options), x.chunk(microbatches), target.chunk(microbatches))

    return step


# ---------------------------------------------------------------------- sums need no scale
class SummingStage(Stage):
    def error(self, h, target):
        return (h @ self.ends["head"] - target).square().sum()


# ---------------------------------------------------------------------- gradients are scaled at the end
class LateStage(Stage):
    def outputs(self):
        return {key: value if value is None else value / MICROBATCHES for key, value in super().outputs().items()}


# ---------------------------------------------------------------------- stages that interleave
def in_turn(chunk, chunks):
    return chunk


def last_chunk_first(chunk, chunks):
    return chunks - 1 - chunk  # fault: the last chunk of layers runs first


def interleaved(passed=in_turn):
    """Each rank has several chunks of layers; the layers go around the ranks once for each chunk."""

    def step(x, target, proj, w, b, head):
        rank, size = dist.get_rank(), dist.get_world_size()
        behind, ahead = (rank - 1) % size, (rank + 1) % size
        proj, w, b, head = leaves(proj, w, b, head)
        chunks = w.size(0)
        loss, sends = torch.zeros(()), []
        in_flight = deque()
        for each, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            for chunk in range(chunks):
                mine = passed(chunk, chunks)
                if rank == 0 and chunk == 0:
                    received, h = None, each @ proj
                else:
                    received = torch.empty(each.size(0), WIDTH)
                    dist.recv(received, behind)
                    h = received.requires_grad_()
                out = blocks(h, w[mine : mine + 1], b[mine : mine + 1])
                if rank == size - 1 and chunk == chunks - 1:
                    out = F.mse_loss(out @ head, wanted) / MICROBATCHES
                    loss = loss + out.detach()
                else:
                    sends.append(dist.isend(out.detach(), ahead))
                in_flight.append((received, out))
        for _ in range(MICROBATCHES):
            parts = [in_flight.popleft() for _ in range(chunks)]
            for chunk, (received, out) in reversed(list(enumerate(parts))):
                if rank == size - 1 and chunk == chunks - 1:
                    out.backward()
                else:
                    grad = torch.empty_like(out)
                    dist.recv(grad, ahead)
                    out.backward(grad)
                if received is not None:
                    sends.append(dist.isend(received.grad, behind))
        for work in sends:
            work.wait()
        return {
            "loss": loss if rank == size - 1 else None,
            "proj": proj.grad if rank == 0 else None,
            "w": w.grad,
            "b": b.grad,
            "head": head.grad if rank == size - 1 else None,
        }

    return step


def every_nth(stages):
    """Layers rank, rank + stages, rank + 2 * stages, ..."""

    def layers(full, coord):
        return full[coord["pp"] :: stages]

    return layers


# ---------------------------------------------------------------------- stages joined by autograd
class SendForward(torch.autograd.Function):
    """Sends the activation; its gradient comes back."""

    @staticmethod
    def forward(ctx, x, peer):
        ctx.peer, ctx.like = peer, x.shape
        dist.send(x.contiguous(), peer)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        result = grad.new_empty(ctx.like)
        dist.recv(result, ctx.peer)
        return result, None


class ReceiveForward(torch.autograd.Function):
    """Receives the activation; its gradient goes back."""

    @staticmethod
    def forward(ctx, anchor, shape, peer):
        ctx.peer = peer
        result = anchor.new_empty(shape)
        dist.recv(result, peer)
        return result

    @staticmethod
    def backward(ctx, grad):
        dist.send(grad.contiguous(), ctx.peer)
        return grad.new_zeros(()), None, None


def by_autograd(x, target, proj, w, b, head):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    proj, w, b, head = leaves(proj, w, b, head)
    anchor = torch.zeros((), requires_grad=True)
    total = torch.zeros(())
    for each, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        h = each @ proj if rank == 0 else ReceiveForward.apply(anchor, (each.size(0), WIDTH), rank - 1)
        h = blocks(h, w, b)
        out = F.mse_loss(h @ head, wanted) / MICROBATCHES if rank == last else SendForward.apply(h, rank + 1)
        out.backward()
        total = total + out.detach()
    return {
        "loss": total if rank == last else None,
        "proj": proj.grad,
        "w": w.grad,
        "b": b.grad,
        "head": head.grad,
    }


# ---------------------------------------------------------------------- the forward alone, and its loss on every stage
def forward_loss(x, target, proj, w, b, head):
    return F.mse_loss(blocks(x @ proj, w, b) @ head, target)


def broadcast_loss(x, target, proj, w, b, head):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    h = x @ proj if rank == 0 else torch.empty(x.size(0), WIDTH)
    if rank > 0:
        dist.recv(h, rank - 1)
    h = blocks(h, w, b)
    if rank < last:
        dist.send(h, rank + 1)
    loss = F.mse_loss(h @ head, target) if rank == last else torch.empty(())
    dist.broadcast(loss, last)
    return loss


def loss_of_zeros_elsewhere(x, target, proj, w, b, head):
    """The loss is 0 on all stages but the last, and their sum is what all report."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    loss = torch.zeros(())
    for each, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        h = each @ proj if rank == 0 else torch.empty(each.size(0), WIDTH)
        if rank > 0:
            dist.recv(h, rank - 1)
        h = blocks(h, w, b)
        if rank < last:
            dist.send(h, rank + 1)
        else:
            loss += F.mse_loss(h @ head, wanted) / MICROBATCHES
    dist.all_reduce(loss)
    return loss


# ---------------------------------------------------------------------- faults
class UnscaledStage(Stage):
    def error(self, h, target):
        return F.mse_loss(h @ self.ends["head"], target) / self.scale  # fault: the mean of each microbatch counts in full


class TwiceScaledStage(Stage):
    def outputs(self):
        for grad in (self.w.grad, self.b.grad):
            grad /= MICROBATCHES  # fault: scaled here and in the loss
        return super().outputs()


class MixedStage(Stage):
    """The first stage takes the last microbatch back first, the others the first one."""

    def unroll(self, grad):
        received, out = self.in_flight.pop() if self.first else self.in_flight.popleft()
        out.backward(None if self.last else grad)  # fault: the gradient of another microbatch
        return None if self.first else received.grad


class ForgetfulStage(Stage):
    def unroll(self, grad):
        received, out = self.in_flight.popleft()
        self.w.grad = None  # fault: the gradient of earlier microbatches is lost
        out.backward(None if self.last else grad)
        return None if self.first else received.grad


class WrongTensorStage(Stage):
    def run(self, x, h, target):
        out = super().run(x, h, target)
        return out if self.first or self.last else self.in_flight[-1][0].detach()  # fault: sends what it received


class LastLossStage(Stage):
    def run(self, x, h, target):
        out = super().run(x, h, target)
        if self.last:
            self.loss = out / self.scale  # fault: the loss of the last microbatch alone
        return out


class ShiftedTargetStage(Stage):
    def error(self, h, target):
        return F.mse_loss(h @ self.ends["head"], target.roll(1, 0))  # fault: the targets are those of other samples


def loss_times_stages(x, target, proj, w, b, head):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    h = x @ proj if rank == 0 else torch.empty(x.size(0), WIDTH)
    if rank > 0:
        dist.recv(h, rank - 1)
    h = blocks(h, w, b)
    if rank < last:
        dist.send(h, rank + 1)
    loss = F.mse_loss(h @ head, target) if rank == last else torch.empty(())
    dist.broadcast(loss, last)
    dist.all_reduce(loss)  # fault: the loss, which all have, is summed over the stages
    return loss


# ---------------------------------------------------------------------- cases
STACKED = {"loss": {}, "proj": {}, "w": {"pp": Shard(0)}, "b": {"pp": Shard(0)}, "head": {}}


def plain(name, distributed, stages, sequential=squared_step, relation=STACKED, outputs=None, layers=None):
    split = {"placement": Shard(0)} if layers is None else {"local": layers}
    inputs = {
        "x": Input((BATCH, FEATURES)),
        "target": Input((BATCH, CLASSES)),
        "proj": Input((FEATURES, WIDTH)),
        "w": Input((LAYERS, WIDTH, WIDTH), **split),
        "b": Input((LAYERS, WIDTH), **split),
        "head": Input((WIDTH, CLASSES)),
    }
    return Case(f"pipeline-{name}", sequential, distributed, {"pp": stages}, inputs, relation, outputs or {})


def interleaving(name, distributed, stages):
    layers = every_nth(stages)
    relation = STACKED | {"w": layers, "b": layers}
    return plain(name, distributed, stages, relation=relation, outputs={"w": layers, "b": layers}, layers=layers)


def correct(stages):
    whole = {"out": {}}
    return [
        plain(f"gpipe-{stages}", pipelined(gpipe), stages),
        plain(f"gpipe-blocking-{stages}", pipelined(gpipe, BlockingStage), stages),
        plain(f"gpipe-backwards-{stages}", pipelined(gpipe, BackwardsStage), stages),
        plain(f"1f1b-{stages}", pipelined(one_forward_one_backward), stages),
        plain(f"1f1b-few-microbatches-{stages}", pipelined(one_forward_one_backward, microbatches=2), stages),
        plain(f"1f1b-batched-{stages}", pipelined(paired), stages),
        plain(f"sum-{stages}", pipelined(one_forward_one_backward, SummingStage, scale=1), stages, summed_step),
        plain(f"scaled-late-{stages}", pipelined(gpipe, LateStage, scale=1), stages),
        plain(f"by-autograd-{stages}", by_autograd, stages),
        plain(f"broadcast-loss-{stages}", broadcast_loss, stages, forward_loss, whole),
        plain(f"loss-of-zeros-elsewhere-{stages}", loss_of_zeros_elsewhere, stages, forward_loss, whole),
    ]


def faults():
    def seeded(case, name, stage, fault, order=one_forward_one_backward, **changed):
        return faulty(case, f"pipeline-fault-{name}", pipelined(order, stage), fault, stated=("*",), **changed)

    two, four = plain("", None, 2), plain("", None, 4)
    loss = plain("", None, 4, forward_loss, {"out": {}})
    return [
        seeded(two, "unscaled", UnscaledStage, "the mean of each microbatch counts in full"),
        seeded(four, "scaled-twice", TwiceScaledStage, "scaled here and in the loss"),
        seeded(four, "mixed-microbatches", MixedStage, "the gradient of another microbatch", gpipe),
        seeded(two, "forgets", ForgetfulStage, "the gradient of earlier microbatches is lost"),
        seeded(four, "wrong-tensor", WrongTensorStage, "sends what it received"),
        seeded(two, "last-loss", LastLossStage, "the loss of the last microbatch alone"),
        seeded(two, "shifted-targets", ShiftedTargetStage, "the targets are those of other samples"),
        faulty(
            loss, "pipeline-fault-loss-times-stages", loss_times_stages, "the loss, which all have, is summed over the stages"
        ),
        faulty(
            interleaving("", None, 2),
            "pipeline-fault-interleaved-order",
            interleaved(last_chunk_first),
            "the last chunk of layers runs first",
            stated=("*",),
        ),
    ]


CASES = [
    *[case for stages in (2, 4) for case in correct(stages)],
    interleaving("interleaved-2", interleaved(), 2),
    *faults(),
]
