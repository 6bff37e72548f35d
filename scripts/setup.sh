#!/usr/bin/env bash
# Makes .venv with a Python of 3.11 to 3.13 and installs ludus into it. Safe to run again.
#
# PYTHON=/path/to/python chooses the interpreter; otherwise python3, if it is of the right version,
# then python3.13, python3.12, python3.11.
set -euo pipefail
cd "$(dirname "$0")/.."

suits() { # whether the command runs, and is of a version that ludus supports
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null
}

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        suits "$PYTHON" && echo "$PYTHON" && return
        echo "PYTHON=$PYTHON is not a Python of 3.11 to 3.13" >&2
        return 1
    fi
    local name
    for name in python3 python3.13 python3.12 python3.11; do
        suits "$name" && echo "$name" && return
    done
    echo "ludus needs Python 3.11, 3.12 or 3.13, and none was found: install one, or name it" \
        "by 'make setup PYTHON=/path/to/python'" >&2
    return 1
}

if ! suits .venv/bin/python; then
    python=$(find_python)
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv || {
        echo "$python cannot make virtual environments (Debian: apt-get install python3-venv)" >&2
        exit 1
    }
fi
names() { # of pip's output, the packages, one line each: an installation takes minutes
    sed -u -n -e 's/^Collecting \([A-Za-z0-9._-]*\).*/  \1/p' \
        -e 's/^Installing collected packages:.*/Unpacking them/p'
}

echo "Installing ludus and what it needs into .venv (the first time takes some minutes)"
# pip would compile 39,000 files on one core, which takes minutes.
PYTHONUNBUFFERED=1 .venv/bin/python -m pip install --disable-pip-version-check --no-compile \
    --progress-bar off -c constraints.txt -e '.[dev]' 2> >(grep -v '^WARNING' >&2) | names
# The client of OpenEnv, for its test. The rest of the package is for servers, which ludus has its
# own of, and needs forty packages more.
.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-deps 'openenv==0.10.0'
# On all cores. Quiet, for packages hold a few files that no Python compiles, and some with warnings.
.venv/bin/python -W ignore -m compileall -qq -j 0 .venv/lib >/dev/null 2>&1 || true
touch .venv/.ready
echo "Done. Next: source .venv/bin/activate && ludus --help; or make demo"
