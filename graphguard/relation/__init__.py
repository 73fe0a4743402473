"""What outputs are expected to be, and how the ranks' tiles lie in them: plain data, without torch."""
