"""The report of a co-evolution, and its problems to browse: pages, and lists for a terminal."""
