"""Times of kernels on a GPU, in a process of their own."""
