"""Decoders of two layers, GPT and Llama, under tensor parallelism and tensor + sequence parallelism, to all gradients."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cases.attention import HEAD as GPT_HEAD
from cases.attention import causal_softmax
from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import (
    copy_to,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_sequence,
)
from cases.rope import HEAD as LLAMA_HEAD
from cases.rope import turned_by_halves
from cases.vocabulary import CrossEntropy, CrossEntropyInPlace, embedded_by_index_put, embedded_by_masked_fill
from graphguard import Input, Shard

TP = (2, 4, 8)
LAYERS, BATCH, SEQUENCE, HIDDEN, INNER, VOCAB = 2, 3, 8, 6, 16, 40


@dataclass(frozen=True)
class Region:
    """How the ranks enter and leave the part of a layer that they split."""

    group: Any
    splits_sequence: bool

    def enter(self, x):
        return gather_sequence(x, self.group) if self.splits_sequence else copy_to(x, self.group)

    def leave(self, x):
        return reduce_scatter_sequence(x, self.group) if self.splits_sequence else reduce_from(x, self.group)

    def split(self, x):
        return scatter_sequence(x, self.group) if self.splits_sequence else x


def result(loss, grads):
    return {"loss": loss.detach(), "grads": grads}


def summed(grads, starts, group):
    """The gradients of parameters that met only this rank's tokens, known by how their names start."""
    for name, grad in grads.items():
        if name.startswith(starts):
            dist.all_reduce(grad, group=group)
    return grads


def first_row(weight, group):
    return dist.get_rank(group) * weight.size(0)


# ---------------------------------------------------------------------- GPT
def layer_norm(x, p, name):
    return F.layer_norm(x, (HIDDEN,), p[f"{name}_w"], p[f"{name}_b"])


def fused_attention(qkv):
    """[sequence, batch, heads * 3 * head], interleaved by head."""
    q, k, v = qkv.unflatten(-1, (-1, 3 * GPT_HEAD)).permute(1, 2, 0, 3).chunk(3, -1)
    return causal_softmax(q, k, v).permute(2, 0, 1, 3).flatten(2)


def gpt(tokens, target, **params):
    """The embedding is the head's weight too."""
    p = leaves(params)
    x = (F.embedding(tokens, p["emb"]) + p["pos"]).transpose(0, 1)
    for i in range(LAYERS):
        h = fused_attention(F.linear(layer_norm(x, p, f"norm_attn{i}"), p[f"wqkv{i}"], p[f"bqkv{i}"]))
        x = x + F.linear(h, p[f"wo{i}"], p[f"bo{i}"])
        h = F.gelu(F.linear(layer_norm(x, p, f"norm_mlp{i}"), p[f"w_in{i}"], p[f"b_in{i}"]), approximate="tanh")
        x = x + F.linear(h, p[f"w_out{i}"], p[f"b_out{i}"])
    logits = F.linear(layer_norm(x, p, "norm"), p["emb"])
    loss = F.cross_entropy(logits.flatten(0, 1), target.transpose(0, 1).flatten())
    return result(loss, gradients(loss, p))


def gpt_layer(x, p, i, region):
    h = region.enter(layer_norm(x, p, f"norm_attn{i}"))
    h = fused_attention(F.linear(h, p[f"wqkv{i}"], p[f"bqkv{i}"]))
    x = x + region.leave(F.linear(h, p[f"wo{i}"])) + p[f"bo{i}"]
    h = region.enter(layer_norm(x, p, f"norm_mlp{i}"))
    h = F.gelu(F.linear(h, p[f"w_in{i}"], p[f"b_in{i}"]), approximate="tanh")
    return x + region.leave(F.linear(h, p[f"w_out{i}"])) + p[f"b_out{i}"]


def gpt_loss(tokens, target, p, region, layers):
    x = reduce_from(embedded_by_index_put(tokens, p["emb"], first_row(p["emb"], region.group)), region.group)
    x = region.split((x + p["pos"]).transpose(0, 1))
    for i, layer in enumerate(layers):
        x = layer(x, p, i, region)
    logits = F.linear(region.enter(layer_norm(x, p, "norm")), p["emb"])
    start = first_row(p["emb"], region.group)
    return CrossEntropyInPlace.apply(logits, target.transpose(0, 1).contiguous(), start, region.group).mean()


GPT_ON_SHARDS = ("norm", "bo", "b_out")


def gpt_tp_with(*layers):
    def gpt_tp(tokens, target, mesh, **params):
        p = leaves(params)
        loss = gpt_loss(tokens, target, p, Region(mesh.get_group("tp"), False), layers)
        return result(loss, gradients(loss, p))

    return gpt_tp


def gpt_sp(tokens, target, mesh, **params):
    p, group = leaves(params), mesh.get_group("tp")
    loss = gpt_loss(tokens, target, p, Region(group, True), [gpt_layer] * LAYERS)
    return result(loss, summed(gradients(loss, p), GPT_ON_SHARDS, group))


def gpt_layer_bias_inside(x, p, i, region):
    h = region.enter(layer_norm(x, p, f"norm_attn{i}"))
    h = fused_attention(F.linear(h, p[f"wqkv{i}"], p[f"bqkv{i}"]))
    h = F.linear(h, p[f"wo{i}"], p[f"bo{i}"])  # fault: the bias is in every summand
    x = x + region.leave(h)
    h = region.enter(layer_norm(x, p, f"norm_mlp{i}"))
    h = F.gelu(F.linear(h, p[f"w_in{i}"], p[f"b_in{i}"]), approximate="tanh")
    return x + region.leave(F.linear(h, p[f"w_out{i}"])) + p[f"b_out{i}"]


def gpt_layer_without_copy(x, p, i, region):
    h = region.enter(layer_norm(x, p, f"norm_attn{i}"))
    h = fused_attention(F.linear(h, p[f"wqkv{i}"], p[f"bqkv{i}"]))
    x = x + region.leave(F.linear(h, p[f"wo{i}"])) + p[f"bo{i}"]
    h = layer_norm(x, p, f"norm_mlp{i}")
    h = F.linear(h, p[f"w_in{i}"], p[f"b_in{i}"])  # fault: the gradient of the input is not summed
    h = F.gelu(h, approximate="tanh")
    return x + region.leave(F.linear(h, p[f"w_out{i}"])) + p[f"b_out{i}"]


def gpt_sp_averaged(tokens, target, mesh, **params):
    p, group = leaves(params), mesh.get_group("tp")
    loss = gpt_loss(tokens, target, p, Region(group, True), [gpt_layer] * LAYERS)
    grads = summed(gradients(loss, p), ("norm", "bo"), group)
    for i in range(LAYERS):
        dist.all_reduce(grads[f"b_out{i}"], op=dist.ReduceOp.AVG, group=group)  # fault: mean of gradients in place of the sum
    return result(loss, grads)


def gpt_case(name, distributed, tp, heads=8):
    whole, column, row = {}, {"tp": Shard(0)}, {"tp": Shard(1)}
    layout = {"emb": ((VOCAB, HIDDEN), column), "pos": ((SEQUENCE, HIDDEN), whole)}
    for i in range(LAYERS):
        layout |= {f"{norm}{i}_{part}": ((HIDDEN,), whole) for norm in ("norm_attn", "norm_mlp") for part in "wb"}
        width = heads * GPT_HEAD
        layout |= {f"wqkv{i}": ((3 * width, HIDDEN), column), f"bqkv{i}": ((3 * width,), column)}
        layout |= {f"wo{i}": ((HIDDEN, width), row), f"bo{i}": ((HIDDEN,), whole)}
        layout |= {f"w_in{i}": ((INNER, HIDDEN), column), f"b_in{i}": ((INNER,), column)}
        layout |= {f"w_out{i}": ((HIDDEN, INNER), row), f"b_out{i}": ((HIDDEN,), whole)}
    layout |= {"norm_w": ((HIDDEN,), whole), "norm_b": ((HIDDEN,), whole)}
    return decoder_case(f"gpt-{name}-tp{tp}", gpt, distributed, tp, layout)


def decoder_case(name, sequential, distributed, tp, layout):
    inputs = {key: Input((BATCH, SEQUENCE), dtype=torch.int64, low=0, high=VOCAB) for key in ("tokens", "target")}
    inputs |= {key: Input(shape, split) for key, (shape, split) in layout.items()}
    relation = {"loss": {}, **{f"grads.{key}": split for key, (_, split) in layout.items()}}
    return Case(name, sequential, distributed, {"tp": tp}, inputs, relation)


def gpt_cases():
    for tp in TP:
        yield gpt_case("tensor-parallel", gpt_tp_with(gpt_layer, gpt_layer), tp)
        yield gpt_case("sequence-parallel", gpt_sp, tp)


def gpt_faults():
    base = gpt_case("", gpt_sp, 2)
    second = gpt_tp_with(gpt_layer, gpt_layer_bias_inside)
    yield faulty(base, "gpt-bias-inside-the-second-layer", second, "the bias is in every summand")
    second = gpt_tp_with(gpt_layer, gpt_layer_without_copy)
    yield faulty(base, "gpt-second-layer-without-copy", second, "the gradient of the input is not summed")
    yield faulty(base, "gpt-gradients-averaged", gpt_sp_averaged, "mean of gradients in place of the sum")


# ---------------------------------------------------------------------- Llama
def rms_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def heads_first(t):
    """[sequence, batch, heads * head] as [batch, heads, sequence, head]."""
    return t.unflatten(-1, (-1, LLAMA_HEAD)).permute(1, 2, 0, 3)


def rotary_attention(h, wq, wk, wv):
    q, k, v = (heads_first(F.linear(h, w)) for w in (wq, wk, wv))
    positions = torch.arange(h.size(0))
    q, k = turned_by_halves(q, positions), turned_by_halves(k, positions)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.permute(2, 0, 1, 3).flatten(2)


def swiglu(h, gate, up):
    return F.silu(F.linear(h, gate)) * F.linear(h, up)


def llama(tokens, target, **params):
    p = leaves(params)
    x = F.embedding(tokens.transpose(0, 1), p["emb"])
    for i in range(LAYERS):
        h = rotary_attention(rms_norm(x, p[f"norm_attn{i}"]), p[f"wq{i}"], p[f"wk{i}"], p[f"wv{i}"])
        x = x + F.linear(h, p[f"wo{i}"])
        h = swiglu(rms_norm(x, p[f"norm_mlp{i}"]), p[f"gate{i}"], p[f"up{i}"])
        x = x + F.linear(h, p[f"down{i}"])
    logits = F.linear(rms_norm(x, p["norm"]), p["head"])
    loss = F.cross_entropy(logits.flatten(0, 1), target.transpose(0, 1).flatten())
    return result(loss, gradients(loss, p))


def llama_layer(x, p, i, region):
    h = region.enter(rms_norm(x, p[f"norm_attn{i}"]))
    h = rotary_attention(h, p[f"wq{i}"], p[f"wk{i}"], p[f"wv{i}"])
    x = x + region.leave(F.linear(h, p[f"wo{i}"]))
    h = region.enter(rms_norm(x, p[f"norm_mlp{i}"]))
    return x + region.leave(F.linear(swiglu(h, p[f"gate{i}"], p[f"up{i}"]), p[f"down{i}"]))


def llama_loss(tokens, target, p, region, layers):
    rows = embedded_by_masked_fill(tokens.transpose(0, 1), p["emb"], first_row(p["emb"], region.group))
    x = region.leave(rows)
    for i, layer in enumerate(layers):
        x = layer(x, p, i, region)
    logits = F.linear(region.enter(rms_norm(x, p["norm"])), p["head"])
    return CrossEntropy.apply(logits, target.transpose(0, 1), first_row(p["head"], region.group), region.group).mean()


def llama_tp_with(*layers):
    def llama_tp(tokens, target, mesh, **params):
        p = leaves(params)
        loss = llama_loss(tokens, target, p, Region(mesh.get_group("tp"), False), layers)
        return result(loss, gradients(loss, p))

    return llama_tp


def llama_sp(tokens, target, mesh, **params):
    p, group = leaves(params), mesh.get_group("tp")
    loss = llama_loss(tokens, target, p, Region(group, True), [llama_layer] * LAYERS)
    return result(loss, summed(gradients(loss, p), ("norm",), group))


def llama_layer_residual_inside(x, p, i, region):
    h = region.enter(rms_norm(x, p[f"norm_attn{i}"]))
    h = rotary_attention(h, p[f"wq{i}"], p[f"wk{i}"], p[f"wv{i}"])
    x = region.leave(x + F.linear(h, p[f"wo{i}"]))  # fault: the residual is in every summand
    h = region.enter(rms_norm(x, p[f"norm_mlp{i}"]))
    return x + region.leave(F.linear(swiglu(h, p[f"gate{i}"], p[f"up{i}"]), p[f"down{i}"]))


def llama_layer_silu_of_up(x, p, i, region):
    h = region.enter(rms_norm(x, p[f"norm_attn{i}"]))
    h = rotary_attention(h, p[f"wq{i}"], p[f"wk{i}"], p[f"wv{i}"])
    x = x + region.leave(F.linear(h, p[f"wo{i}"]))
    h = region.enter(rms_norm(x, p[f"norm_mlp{i}"]))
    gate, up = F.linear(h, p[f"gate{i}"]), F.linear(h, p[f"up{i}"])
    return x + region.leave(F.linear(gate * F.silu(up), p[f"down{i}"]))  # fault: silu of up in place of gate


def llama_sp_sharded_gradient_summed(tokens, target, mesh, **params):
    p, group = leaves(params), mesh.get_group("tp")
    loss = llama_loss(tokens, target, p, Region(group, True), [llama_layer] * LAYERS)
    grads = summed(gradients(loss, p), ("norm",), group)
    for i in range(LAYERS):
        dist.all_reduce(grads[f"wk{i}"], group=group)  # fault: the ranks have different key heads
    return result(loss, grads)


def llama_sp_divided(tokens, target, mesh, **params):
    p, group = leaves(params), mesh.get_group("tp")
    loss = llama_loss(tokens, target, p, Region(group, True), [llama_layer] * LAYERS)
    grads = gradients(loss / dist.get_world_size(group), p)  # fault: every rank has the whole loss
    return result(loss, summed(grads, ("norm",), group))


def llama_case(name, distributed, tp, heads=16, kv_heads=8):
    whole, column, row = {}, {"tp": Shard(0)}, {"tp": Shard(1)}
    layout = {"emb": ((VOCAB, HIDDEN), column), "head": ((VOCAB, HIDDEN), column), "norm": ((HIDDEN,), whole)}
    for i in range(LAYERS):
        layout |= {f"norm_attn{i}": ((HIDDEN,), whole), f"norm_mlp{i}": ((HIDDEN,), whole)}
        layout |= {f"wq{i}": ((heads * LLAMA_HEAD, HIDDEN), column), f"wo{i}": ((HIDDEN, heads * LLAMA_HEAD), row)}
        layout |= {f"{key}{i}": ((kv_heads * LLAMA_HEAD, HIDDEN), column) for key in ("wk", "wv")}
        layout |= {f"gate{i}": ((INNER, HIDDEN), column), f"up{i}": ((INNER, HIDDEN), column)}
        layout |= {f"down{i}": ((HIDDEN, INNER), row)}
    return decoder_case(f"llama-{name}-tp{tp}", llama, distributed, tp, layout)


def llama_cases():
    for tp in TP:
        yield llama_case("tensor-parallel", llama_tp_with(llama_layer, llama_layer), tp)
        yield llama_case("sequence-parallel", llama_sp, tp)


def llama_faults():
    base = llama_case("", llama_sp, 2)
    second = llama_tp_with(llama_layer, llama_layer_residual_inside)
    yield faulty(base, "llama-residual-inside-the-second-layer", second, "the residual is in every summand")
    first = llama_tp_with(llama_layer_silu_of_up, llama_layer)
    yield faulty(base, "llama-silu-of-up", first, "silu of up in place of gate")
    yield faulty(base, "llama-sharded-gradient-summed", llama_sp_sharded_gradient_summed, "the ranks have different key heads")
    yield faulty(base, "llama-loss-divided", llama_sp_divided, "every rank has the whole loss")


CASES = [*gpt_cases(), *llama_cases(), *gpt_faults(), *llama_faults()]
