"""What the environment of kernels needs."""

from __future__ import annotations

from tests.kernels.conftest import nvrtc  # noqa: F401 - a fixture
from tests.kernels.verify.conftest import cpp  # noqa: F401 - a fixture
