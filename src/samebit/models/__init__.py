"""One model family a file."""
