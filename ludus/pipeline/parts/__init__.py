"""The parts that a run is built from, by name: registries, tokenizer, policies, programs."""
