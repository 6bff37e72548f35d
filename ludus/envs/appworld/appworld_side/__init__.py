"""Programs that run in AppWorld's own environment (`make appworld`), not in that of ludus."""
