"""Generated tasks for small models: nothing is downloaded."""
