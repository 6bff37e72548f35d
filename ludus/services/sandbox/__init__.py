"""The sandbox over HTTP."""
