"""Expert parallelism: one expert per rank, tokens travel to their expert and back by all-to-all.

Token t goes to expert t modulo the number of experts (a hash layer), so each rank sends as much as it receives.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import graphguard as gg
from graphguard import Shard

TOKENS, HIDDEN, WIDTH, EXPERTS = 32, 4, 6, 4


def expert(x, up, down):
    return F.gelu(x @ up) @ down


def moe(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN)
    return torch.stack([expert(slots[:, e], up[e], down[e]) for e in range(EXPERTS)], 1).view(TOKENS, HIDDEN)


def exchanged(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def ep_moe(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()  # one slot per rank
    mine = exchanged(slots)  # my expert's tokens, by the rank that they come from
    back = exchanged(expert(mine, up[0], down[0]))
    return back.transpose(0, 1).reshape(x.shape)


def verify(program):
    inputs = {
        "x": gg.Input((TOKENS, HIDDEN), Shard(0)),
        "up": gg.Input((EXPERTS, HIDDEN, WIDTH), Shard(0)),
        "down": gg.Input((EXPERTS, WIDTH, HIDDEN), Shard(0)),
    }
    return gg.verify(moe, program, mesh={"ep": EXPERTS}, inputs=inputs, outputs={"out": Shard(0)})


@gg.check
def hash_layer():
    return verify(ep_moe)


# ---------------------------------------------------------------------- and what goes wrong
def never_sent(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()
    # fault: tokens_stay_at_home
    back = exchanged(expert(slots, up[0], down[0]))
    return back.transpose(0, 1).reshape(x.shape)


def never_sent_back(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()
    mine = exchanged(slots)
    # fault: results_stay_with_their_expert
    back = expert(mine, up[0], down[0])
    return back.transpose(0, 1).reshape(x.shape)


def joined_by_expert(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()
    back = exchanged(expert(exchanged(slots), up[0], down[0]))
    # fault: results_in_the_order_of_experts
    return back.reshape(x.shape)


def summed_instead(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()
    back = expert(exchanged(slots), up[0], down[0])
    # fault: results_of_all_experts_summed
    dist.all_reduce(back)
    return back.transpose(0, 1).reshape(x.shape)


def as_if_sent_to_all(x, up, down):
    slots = x.view(-1, EXPERTS, HIDDEN).transpose(0, 1).contiguous()
    # fault: results_divided_by_the_experts
    back = exchanged(expert(exchanged(slots), up[0], down[0])) / EXPERTS
    return back.transpose(0, 1).reshape(x.shape)


@gg.check(expect="refuted")
def results_divided_by_the_experts():
    return verify(as_if_sent_to_all)


@gg.check(expect="refuted")
def results_stay_with_their_expert():
    return verify(never_sent_back)


@gg.check(expect="refuted")
def results_in_the_order_of_experts():
    return verify(joined_by_expert)


@gg.check(expect="refuted")
def results_of_all_experts_summed():
    return verify(summed_instead)


@gg.check(expect="refuted")
def tokens_stay_at_home():
    return verify(never_sent)
