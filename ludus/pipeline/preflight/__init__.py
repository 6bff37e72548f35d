"""Tries the parts of a run before its folder exists."""
