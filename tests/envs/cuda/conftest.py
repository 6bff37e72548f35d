"""What the environment of kernels needs."""

from __future__ import annotations

from tests.kernels.conftest import cpp  # noqa: F401 - a fixture
