"""Programs that must never verify, one file for each place where a hole was."""
