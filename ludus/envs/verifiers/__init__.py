"""Tasksets of verifiers, played in an environment of their own."""
