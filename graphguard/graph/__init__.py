"""The graph that every part of GraphGuard shares, all ranks' graphs matched, and what is told about them. No torch."""
