"""One algorithm a file; the file name is the algorithm's name."""
