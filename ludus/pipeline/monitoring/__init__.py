"""What watches a run: progress, budget, notifications, diagnosis, and the watchdog."""
