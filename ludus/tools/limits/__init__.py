"""Limits on the rate of calls, over processes and hosts."""
