"""Configuration: schema, loading, overrides, reference."""
