"""ALFWorld."""
