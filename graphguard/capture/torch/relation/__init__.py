"""What the user says in torch of inputs, outputs and parameters, and what tensors say of themselves, read into graphs."""
