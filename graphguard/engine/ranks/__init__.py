"""Ranks described at once, and what communication does to descriptions."""
