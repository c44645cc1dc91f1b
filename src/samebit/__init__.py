"""Samebit: reinforcement learning where rollout and training are the same function, bit for bit."""

__version__ = "0.1.0"
