"""The atoms of one proof, what is known of them, and a record of every question."""
