"""Operators at positions that are known: what they read and write is spelled out as slices, concatenations and sums."""
