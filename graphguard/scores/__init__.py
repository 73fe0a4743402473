"""How often reports name the faulty line, on faults that are known."""
