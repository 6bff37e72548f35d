"""The languages of the sandbox: file name, compiler, interpreter."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from ludus.core.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Language:
    """Commands that run the code of a language.

    `file`: the name under which the code is written. `compile` and `run`: commands. `package`: the
    Debian package that has `program`. `reserves`: the interpreter reserves far more addresses than
    it uses, so memory is bounded by what it may write, not by its addresses.
    """

    file: str
    program: str
    package: str
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    reserves: bool = False

    @property
    def is_installed(self) -> bool:
        """True if the program is on the path."""
        return shutil.which(self.program, path=PATH) is not None


PATH = "/usr/local/bin:/usr/bin:/bin"

LANGUAGES = {
    "python": Language("main.py", "python3", "python3", ()),
    "bash": Language("main.sh", "bash", "bash", ("bash", "main.sh")),
    "c": Language(
        "main.c",
        "gcc",
        "gcc",
        ("./main",),
        ("gcc", "-O2", "-std=c17", "-o", "main", "main.c", "-lm"),
    ),
    "cpp": Language(
        "main.cpp",
        "g++",
        "g++",
        ("./main",),
        ("g++", "-O2", "-std=c++20", "-o", "main", "main.cpp"),
    ),
    "javascript": Language("main.js", "node", "nodejs", ("node", "main.js"), reserves=True),
}
ALIASES = {"py": "python", "python3": "python", "sh": "bash", "c++": "cpp", "js": "javascript"}
ALIASES |= {"nodejs": "javascript", "node": "javascript"}


def language_named(name: str) -> Language:
    """Returns an installed language.

    Errors: ConfigError for one that is unknown or not installed.
    """
    key = ALIASES.get(name.lower(), name.lower())
    if key not in LANGUAGES:
        known = did_you_mean(name, LANGUAGES)
        raise ConfigError(f"sandbox: there is no language {name!r}{known}")
    language = LANGUAGES[key]
    if key != "python" and not language.is_installed:
        raise ConfigError(
            f"sandbox: {key} needs {language.program}, which is not installed: "
            f"apt install {language.package}"
        )
    return language
