"""What is known to be missing: correct cases that are not proved. docs/located.md says how often a faulty line is named."""

NOT_YET = frozenset({
    "ring-flash-stripes-2", "ring-flash-stripes-4", "ring-flash-stripes-8",
    "convolution-halo-4",
    "masked-ring-log-2", "masked-ring-log-4",
})  # fmt: skip
# Correct cases of which it is not shown that what the ranks compute is defined. A count of zero is not seen in gradients, which
# are zero then; and the ranks divide by another number that is zero.
CONDITIONAL = frozenset({"forms-mean-count-dp2", "forms-mean-count-dp4"})
