"""Hopper kernels: one operator a file, kernel and launcher, no policy."""
