"""Breakpoints in user code, and the programs that attach to them."""
