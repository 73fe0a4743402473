"""Descriptions as numbers, independent of how they were found."""
