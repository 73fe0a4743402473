"""Small programs that, together, call every operator that has a row: what the lemma audit runs."""

from __future__ import annotations

from graphguard.audit.samples import networks, reductions, tensors  # noqa: F401 - importing samples registers them
from graphguard.audit.samples.sample import SAMPLES, Sample, Spec

__all__ = ["SAMPLES", "Sample", "Spec"]
