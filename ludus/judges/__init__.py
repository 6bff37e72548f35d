"""What turns a trajectory into a score."""
