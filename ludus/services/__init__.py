"""Servers over the library."""
