"""Where environments run: deadlines, worker threads, processes; and the watch over blocking."""
