"""Code in verl's environment: its process, the agent loop in its workers, its CPU platform."""
