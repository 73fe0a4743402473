"""Small programs that, together, call every operator that has a row: what the lemma audit runs."""

from __future__ import annotations

from graphguard.oracle.samples import networks, reductions, tensors  # noqa: F401 - importing samples registers them
from graphguard.oracle.samples.sample import SAMPLES, Sample, Spec

__all__ = ["SAMPLES", "Sample", "Spec"]
