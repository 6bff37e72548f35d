"""Task augmentation: a model writes new tasks from seed tasks."""
