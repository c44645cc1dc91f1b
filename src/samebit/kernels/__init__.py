"""Hopper kernels: one operator a file, kernel and launcher, no policy."""

TRITON = "3.6."
"""The compiler they are proved with: later ones refuse some of them, and bits are a compiler's too."""
