"""Tensor operations on descriptions: the vocabulary in which lemmas are written."""
