"""A small language of kernels: a few lines become CUDA C++ with its launch line."""
