"""Tools over HTTP, with verl-tool's protocol."""
