"""The agent `command`: a program of any language plays the episodes."""
