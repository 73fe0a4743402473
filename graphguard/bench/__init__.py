"""Measurements, run with `graphguard bench`; never part of the tests."""
