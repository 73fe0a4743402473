"""A counterexample made small, and written down as a script."""
