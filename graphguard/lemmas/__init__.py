"""What operators mean, in the engine's vocabulary: one row per operator, one file per family."""
