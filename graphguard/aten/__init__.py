"""What torch's operators are, and how one of them is executed."""
