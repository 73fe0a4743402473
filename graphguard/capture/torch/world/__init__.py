"""Ranks that are not there, and their communication."""
