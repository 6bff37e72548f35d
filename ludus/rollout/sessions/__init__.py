"""One episode as it grows: the token tree, its turns, and calls to a model."""
