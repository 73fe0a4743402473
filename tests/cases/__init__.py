"""Proof cases: small programs, correct and faulty, each with its expected verdict."""
