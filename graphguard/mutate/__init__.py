"""Changes to the ranks of a program that verifies: faults, which must not verify, and rewrites, which should."""
