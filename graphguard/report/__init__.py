"""What `verify` answers, and the pages behind its findings."""
