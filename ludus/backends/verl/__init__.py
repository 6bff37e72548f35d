"""verl as a host: its trainer owns the loop, ludus plays the episodes in its workers."""
