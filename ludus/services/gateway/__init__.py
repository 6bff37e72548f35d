"""The gateway: an API server for agents, a recorder of exact tokens for the trainer."""
