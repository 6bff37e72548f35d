"""Calibrates the recipe of a user's agent from its episodes with a pretrained model."""
