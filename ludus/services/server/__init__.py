"""The generic server: auth, health, metrics, worker processes."""
