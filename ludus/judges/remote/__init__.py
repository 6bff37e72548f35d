"""Scoring by an evaluation service: its wire format, its client, and the judge `remote`."""
