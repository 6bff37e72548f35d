"""The environment service."""
