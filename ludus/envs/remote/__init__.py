"""Client of environment services: one host, or a fleet of many."""
