#!/usr/bin/env bash
# Makes .venv-verifiers, an environment with verifiers for `env: verifiers`. Safe to run again.
#
# verifiers pins packages that ludus has in other versions (openai, mcp), so it gets an environment
# of its own. Install the packages of tasksets there too:
# .venv-verifiers/bin/python -m pip install PACKAGE
set -euo pipefail
cd "$(dirname "$0")/.."

release=verifiers==0.4.0
ready=.venv-verifiers/.ready
[[ -f $ready && $(cat "$ready") == "$release" ]] && exit 0

echo "Installing $release into .venv-verifiers (a minute)"
.venv/bin/python -m venv --clear .venv-verifiers
.venv-verifiers/bin/python -m pip --quiet --quiet --disable-pip-version-check install "$release"
.venv-verifiers/bin/python -c 'import verifiers.v1'
echo "$release" >"$ready"
