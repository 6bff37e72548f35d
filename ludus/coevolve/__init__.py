"""Co-evolution: a curriculum agent and an executor agent train in turns."""
