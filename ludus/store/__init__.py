"""The run store: runs, steps, trajectories, dropped rows."""
