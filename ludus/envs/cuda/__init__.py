"""CUDA kernels that a model writes: compiled, analysed, verified, rewarded."""
