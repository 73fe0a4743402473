"""Results of earlier runs, kept by the content of all that they depend on."""
