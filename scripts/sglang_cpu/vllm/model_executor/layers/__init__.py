"""Stand-in: see the package `vllm`."""
