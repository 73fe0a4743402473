"""From a PyTorch program to its exact graph, on a CPU, without data. Nothing here proves anything."""
