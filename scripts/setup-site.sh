#!/usr/bin/env bash
# Makes .venv-site, an environment with MkDocs for the documentation's site. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

release='mkdocs-material==9.6.14 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11'
ready=.venv-site/.ready
[[ -f $ready && $(cat "$ready") == "$release" ]] && exit 0

echo "Installing MkDocs into .venv-site (half a minute)"
.venv/bin/python -m venv --clear .venv-site
read -ra packages <<<"$release"
.venv-site/bin/python -m pip --quiet --quiet --disable-pip-version-check install "${packages[@]}"
.venv-site/bin/python -c 'import material, mkdocstrings'
echo "$release" >"$ready"
