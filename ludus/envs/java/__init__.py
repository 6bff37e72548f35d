"""Environments with a Java engine."""
