"""Executes captured graphs on real numbers. It proves nothing; it keeps the other parts honest."""
