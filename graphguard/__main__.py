"""`python -m graphguard` is the command line."""

from graphguard.cli import main

main()
