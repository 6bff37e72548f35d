"""Verification that a kernel computes what its reference computes."""
