"""From trajectories to micro-batches: rows, shared prefixes, packing, minibatches."""
