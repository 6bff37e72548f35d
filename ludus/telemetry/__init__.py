"""Logs, metrics and wall-time accounting."""
