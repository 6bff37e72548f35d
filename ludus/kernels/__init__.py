"""CUDA kernels that a model writes: compiled in the sandbox, and analysed."""
