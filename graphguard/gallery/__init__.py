"""The examples as a table and as pages."""
