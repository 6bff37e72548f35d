"""Logs, metrics and where the time goes."""
