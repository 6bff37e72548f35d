"""The model service."""
