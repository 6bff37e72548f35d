"""AdamW, Muon, and the learning rate that a KL limits."""
