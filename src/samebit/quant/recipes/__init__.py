"""One recipe a file; the file name is the recipe's name."""
