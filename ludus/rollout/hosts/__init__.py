"""Hosts of environments: deadlines, worker threads, processes; and the watch over blocking."""
