"""From programs to problems that are stated in graphs. Nothing here proves anything."""
