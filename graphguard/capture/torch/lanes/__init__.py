"""One run of a program for many ranks: what differs from rank to rank is one number per rank."""
