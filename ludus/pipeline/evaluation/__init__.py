"""Evaluation of checkpoints, endpoints and benchmarks, and what is published of a checkpoint."""
