"""ludus in Trinity's processes."""
