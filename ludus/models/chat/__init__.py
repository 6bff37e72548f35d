"""Chat templates, rendering, parsing and tokenizers."""
