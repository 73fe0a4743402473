"""Where the ranks go wrong, and what would mend it, found by execution."""
