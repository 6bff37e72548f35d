"""Processes and signals of this machine."""
