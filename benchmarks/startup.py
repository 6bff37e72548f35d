"""Start-up time of `import ludus` and `ludus --help`: the fastest of several new processes.

    python benchmarks/startup.py

Slower processes were delayed by other load. Exits with 1 if a limit is exceeded. Byte code is
compiled before the measurement.
"""

from __future__ import annotations

import subprocess
import sys
import time

LIMIT_S = 0.3
REPEATS = 15
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import ludus": ["-c", "import ludus"],
    "ludus --help": ["-m", "ludus", "--help"],
}


def fastest(arguments: list[str]) -> float:
    """Wall seconds of the fastest run, process start included."""
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def main() -> int:
    missed = 0
    for name, arguments in COMMANDS.items():
        seconds = fastest(arguments)
        missed += seconds > LIMIT_S
        print(f"{name:<16} {seconds * 1000:6.0f} ms  (limit {LIMIT_S * 1000:.0f} ms)")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
