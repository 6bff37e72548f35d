"""Worker processes of judges: the pool, and what runs in them."""
