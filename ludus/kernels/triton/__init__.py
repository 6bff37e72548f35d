"""Kernels in Triton: a subset of Python, read, compiled and interpreted."""
