#!/usr/bin/env bash
# The programs that some tests need: Chromium (the report, as a reader sees it) and PostgreSQL
# (the run store on a real server). Installs them where it may; otherwise says what to install, and
# those tests are skipped with the same reason.
set -euo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null ||
    missing+=(postgresql)
[[ ${#missing[@]} -eq 0 ]] && exit 0

if command -v apt-get >/dev/null && [[ $(id -u) -eq 0 ]]; then
    echo "Installing what some tests need: ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        >/dev/null; then
        exit 0
    fi
fi
echo "Not installed, so the tests that need it will be skipped: ${missing[*]}" >&2
echo "(Debian: apt-get install ${missing[*]})" >&2
