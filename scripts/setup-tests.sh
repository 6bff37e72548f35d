#!/usr/bin/env bash
# Installs what only tests need. Safe to run again; with all of it there, it touches no network.
#
# 1. Programs from the system's packages: Chromium (opens the report), PostgreSQL (the run store on a
#    server), Java (ScienceWorld, TextWorldExpress), a C++ compiler and make (ALFWorld's engine),
#    bubblewrap, gVisor, Node.js and util-linux (the sandbox), Redis (the rate limiter on several hosts),
#    OpenSSH's server (clusters).
#    They are installed as root where apt-get exists.
# 2. The extra `alfworld` into .venv: its planner is compiled, which takes some minutes.
#
# A part that cannot be installed is named; the tests that need it are skipped with the same reason.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null ||
    missing+=(postgresql)
command -v java >/dev/null || missing+=(default-jre-headless)
command -v g++ >/dev/null || missing+=(g++)
command -v make >/dev/null || missing+=(make)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v setpriv >/dev/null || missing+=(util-linux)
command -v node >/dev/null || missing+=(nodejs)
command -v redis-server >/dev/null || missing+=(redis-server)
command -v sshd >/dev/null || [[ -x /usr/sbin/sshd ]] || missing+=(openssh-server)
command -v ssh >/dev/null || missing+=(openssh-client)
if [[ ${#missing[@]} -gt 0 ]]; then
    export DEBIAN_FRONTEND=noninteractive
    if command -v apt-get >/dev/null && [[ $(id -u) -eq 0 ]] &&
        echo "Installing programs that tests need: ${missing[*]}" && apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
        missing=()
    else
        echo "Not installed, so the tests that need them are skipped: ${missing[*]}" >&2
        echo "(Debian: apt-get install ${missing[*]})" >&2
    fi
fi

# gVisor, which not every release of Debian has.
if ! command -v runsc >/dev/null && command -v apt-get >/dev/null && [[ $(id -u) -eq 0 ]]; then
    apt-get install -y -qq --no-install-recommends runsc >/dev/null 2>&1 ||
        echo "Not installed, so its tests are skipped: runsc (gVisor)" >&2
fi

[[ "${1:-}" == --programs ]] && exit 0
.venv/bin/python -c 'import alfworld, fast_downward, textworld' 2>/dev/null && exit 0
echo "Compiling ALFWorld's planner into .venv (once; some minutes)"
# Its build calls `python`, which a system need not have.
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m pip install --quiet --quiet \
    --disable-pip-version-check -c constraints.txt -e '.[alfworld]' ||
    echo "Not installed, so the tests that need it are skipped: the extra alfworld" >&2
