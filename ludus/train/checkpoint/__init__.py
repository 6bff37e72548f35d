"""Checkpoints and export."""
