"""From scored groups to new weights."""
