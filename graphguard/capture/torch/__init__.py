"""The front end for PyTorch: from a program to its exact graph, on a CPU, without data."""
