"""A/B roll-out of a challenger beside the served model."""
