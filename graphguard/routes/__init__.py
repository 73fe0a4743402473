"""Programs that read values: samples of their inputs, what they decide on them, and graphs that are written for such a path."""
