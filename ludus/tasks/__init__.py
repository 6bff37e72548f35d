"""Where tasks come from, and in which order they are visited."""
