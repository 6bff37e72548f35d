#!/usr/bin/env bash
# Audits code, advisories, licences and secrets, and writes the bill of materials: see audit.py.
# The tools live in .venv-audit, so that .venv holds only what ludus needs.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ! scripts/audit-tools.txt -ot .venv-audit/.ready ]]; then
    .venv/bin/python -m venv --clear .venv-audit
    .venv-audit/bin/python -m pip install --quiet --quiet --disable-pip-version-check \
        -r scripts/audit-tools.txt
    touch .venv-audit/.ready
fi
exec .venv/bin/python scripts/audit.py
