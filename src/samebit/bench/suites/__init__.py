"""Suites: GROUP (the command that runs it), ABOUT, `cases()`, and TARGETS if it has any."""
