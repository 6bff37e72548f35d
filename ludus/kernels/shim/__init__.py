"""A CPU in a GPU's place: kernels compiled by g++, their threads as fibres."""
