"""Decoders: logits for the sampler."""
