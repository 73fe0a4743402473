"""What is known to be missing: correct cases that are not proved, and faults whose line is not among the first two named."""

NOT_YET = frozenset({
    "fused-qkv-groups-tp8",
    "routes-unequal-ep2", "routes-unequal-ep4",
    "context-ring-sigmoid-2", "context-ring-sigmoid-4",
    "context-ring-causal-log-2", "context-ring-causal-log-4",
    "context-ring-step-causal-2", "context-ring-step-causal-4",
    "context-ring-log-4", "context-ring-step-4", "context-ring-step-batched-4",
    "zigzag-ring-2", "zigzag-ring-4", "zigzag-halves-2", "zigzag-halves-4",
    "zigzag-gathered-step-2", "zigzag-gathered-step-4", "zigzag-step-2", "zigzag-step-4",
    "inference-decode-by-log-2", "inference-decode-by-log-4",
})  # fmt: skip
NOT_LOCATED: frozenset[str] = frozenset()
