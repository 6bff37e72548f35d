#!/usr/bin/env bash
# Makes .venv-appworld, an environment with AppWorld's engine for the environment `appworld`. Safe to
# run again.
#
# AppWorld pins packages that exclude ours (pydantic below 2, SQLAlchemy 1.4), so it gets an
# environment of its own. Its apps' code is encrypted in the wheel, and unpacked here, offline. Its
# licence allows to pass that code, and what derives from it, on in encrypted form only: so ludus
# ships a generator of worlds, and this script runs it, once, into the user's cache folder.
set -euo pipefail
cd "$(dirname "$0")/.."

release=appworld==0.1.3.post1
ready=.venv-appworld/.ready
if ! [[ -f $ready && $(cat "$ready") == "$release" ]]; then
    echo "Installing $release into .venv-appworld (230 MB; about a minute)"
    .venv/bin/python -m venv --clear .venv-appworld
    .venv-appworld/bin/python -m pip --quiet --quiet --disable-pip-version-check install "$release"
    APPWORLD_CACHE=$PWD/.venv-appworld/cache .venv-appworld/bin/appworld install >/dev/null
    .venv-appworld/bin/python -c 'import appworld.apps.venmo.apis'
    echo "$release" >"$ready"
fi
.venv/bin/python -m ludus.envs.appworld.worlds
