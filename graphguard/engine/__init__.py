"""Proves. It knows neither torch nor jax, and keeps no state between two proofs."""
