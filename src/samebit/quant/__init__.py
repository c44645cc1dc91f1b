"""Precision: recipes, the plan, the quantised linear."""
