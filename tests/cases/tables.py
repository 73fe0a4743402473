"""Positions that are known beforehand, looked up in a table whose rows are split over the ranks."""

import torch
import torch.distributed as dist

from cases.case import Case, faulty
from cases.leaves import gradients, leaves
from cases.regions import reduce_from
from cases.vocabulary import embedded_by_clamp, embedded_by_masked_fill, embedded_by_product
from graphguard import Input, Shard

LENGTH, HIDDEN, BATCH = 8, 3, 2


def positioned(x, table, dy):
    p = leaves({"table": table})
    y = x + p["table"][torch.arange(LENGTH)]
    return {"y": y.detach(), "grads": gradients(y, p, dy)}


def split_rows(look_up):
    def program(x, table, dy):
        p = leaves({"table": table})
        start = dist.get_rank() * table.size(0)
        y = x + reduce_from(look_up(torch.arange(LENGTH), p["table"], start), None)
        return {"y": y.detach(), "grads": gradients(y, p, dy)}

    return program


def one_row_too_many(positions, table, start):
    place = positions - start
    rows, size = table[place.clamp(0, table.size(0) - 1)], table.size(0)
    return rows * ((place >= 0) & (place <= size)).unsqueeze(-1)  # fault: the next rank's first row is counted, too


def table_case(name, look_up, size):
    inputs = {
        "x": Input((BATCH, LENGTH, HIDDEN)),
        "table": Input((LENGTH, HIDDEN), Shard(0)),
        "dy": Input((BATCH, LENGTH, HIDDEN)),
    }
    relation = {"y": {}, "grads.table": {"tp": Shard(0)}}
    return Case(f"tables-{name}-{size}", positioned, split_rows(look_up), {"tp": size}, inputs, relation)


FORMS = {"masked-fill": embedded_by_masked_fill, "clamp": embedded_by_clamp, "product": embedded_by_product}
CASES = [
    *(table_case(name, look_up, size) for size in (2, 4, 8) for name, look_up in FORMS.items()),
    faulty(
        table_case("", None, 2), "tables-fault-row", split_rows(one_row_too_many), "the next rank's first row is counted, too"
    ),
]
