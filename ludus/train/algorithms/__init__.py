"""Algorithms: advantages, losses, aggregates."""
