"""The kinds of faults that are put into programs."""

from __future__ import annotations

from graphguard.mutate import borders, collectives, operations
from graphguard.mutate.site import Change

KINDS: dict[str, Change] = {
    "drop a collective": collectives.drop_collective,
    "duplicate a collective": collectives.duplicate_collective,
    "replace a collective": collectives.replace_collective,
    "change the reduce operation": collectives.change_reduction,
    "change the group": collectives.change_group,
    "swap shards": collectives.swap_shards,
    "move across a collective": collectives.move_across_collective,
    "shift an offset": operations.shift_offset,
    "change a scale": operations.change_scale,
    "change a constant on one rank": operations.change_constant,
    "swap operands": operations.swap_operands,
    "drop an addend": operations.drop_addend,
    "use a stale value": operations.use_stale_value,
    "change the layout": operations.change_layout,
    "change the operator": operations.change_operator,
    "drop an output": borders.drop_output,
    "change an output's path": borders.change_output_path,
    "change a dtype": borders.change_dtype,
    "change a range": borders.change_range,
    "change the label that is ignored": borders.change_ignored,
    "make it undefined somewhere": borders.make_undefined,
}
ON_ONE_RANK = {"change a constant on one rank", "drop an output"}
# Of these the ranks of a group must agree, or the ranks do not fit together, which needs no proof to see.
TOGETHER = {
    "drop a collective", "duplicate a collective", "replace a collective", "change the reduce operation", "change the group",
}  # fmt: skip
