"""Sums and products of descriptions, and when two of them are equal."""
