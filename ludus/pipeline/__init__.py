"""Training runs: build, train, evaluate, debug, resume."""
