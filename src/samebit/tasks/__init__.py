"""One task source a file."""
