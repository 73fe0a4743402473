"""What operators mean: one row per operator, one file per family."""
