"""TextCraft."""
