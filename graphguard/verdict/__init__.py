"""What a proof and an execution say together."""
