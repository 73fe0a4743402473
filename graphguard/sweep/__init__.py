"""Everything that the installed version of a library ships, built small and verified in a train step."""
