"""Writes the generated pages of docs/ anew. Run by `make docs`; the tests compare them."""

from __future__ import annotations

from pathlib import Path

from ludus.assemble import REGISTRIES
from ludus.core.reference import config_reference


def main() -> None:
    page = Path(__file__).parents[1] / "docs" / "configuration.md"
    page.write_text(config_reference(REGISTRIES), encoding="utf-8")


if __name__ == "__main__":
    main()
