"""Lemmas, and what is claimed of tensors, against torch's own execution."""
