"""Data sets of episodes, by an expert, a model, or both; rollouts from the command line."""
