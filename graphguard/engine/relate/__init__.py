"""How outputs are rebuilt from what the ranks return, and where that breaks."""
