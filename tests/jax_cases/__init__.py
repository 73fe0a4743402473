"""Programs in JAX with the verdicts that are expected of them: a file for each family."""
