"""vLLM's kernels, whose names SGLang imports where it has no kernels of its own; none is called."""

from sgl_kernel import __getattr__ as __getattr__
