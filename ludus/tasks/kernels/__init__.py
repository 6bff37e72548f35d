"""Tasks of writing GPU kernels: published data sets, and generated problems."""
