"""Kernels of the training pass."""
