"""Grading: answer extraction, exact comparison, safe arithmetic and killable workers."""
