"""`@gg.check`: how checks are registered, found and run."""
