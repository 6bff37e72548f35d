"""What the environment of kernels needs."""

from __future__ import annotations

from tests.kernels.conftest import cpp, nvrtc  # noqa: F401 - fixtures
