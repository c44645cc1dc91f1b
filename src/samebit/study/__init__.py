"""Studies: arms x seeds of runs from one file, a tiny model to run them on, one table at the end."""
