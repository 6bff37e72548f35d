"""The watch over a run: progress, budget, notifications, diagnosis, and the watchdog."""
