"""One correction a file; the file name is the correction's name."""
