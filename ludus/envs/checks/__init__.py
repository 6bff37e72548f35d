"""`ludus check-env`."""
