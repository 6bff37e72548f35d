"""Parts that the processes of hosts share: they run in the environment of the host."""
