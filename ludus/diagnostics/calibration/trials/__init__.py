"""Short trials of a recipe, for `ludus init`."""
