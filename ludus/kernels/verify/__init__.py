"""Whether a kernel computes what its reference computes."""
