"""Copies of the KV cache between devices: see the package."""

from sgl_kernel import __getattr__ as __getattr__
