"""The models of the benchmarks: each one on one device, and as Megatron splits it."""
