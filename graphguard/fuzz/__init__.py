"""Random programs: every claim of the prover about every tensor of them, against execution on adversarial inputs."""
