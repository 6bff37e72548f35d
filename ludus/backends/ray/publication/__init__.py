"""Publication of weights: buckets, their transports, and the versions that samplers have."""
