"""The front end for HLO text: what XLA's partitioner was given, and what it wrote."""
