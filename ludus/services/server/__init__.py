"""Generic HTTP server: auth, health, metrics, errors as JSON, worker processes."""
