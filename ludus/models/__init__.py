"""Models, tokenizers, renderers, samplers."""
