"""Batch-invariant computation."""
