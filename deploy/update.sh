#!/usr/bin/env bash
# Update a machine without containers: pull, install, restart the running units.
#
#   update.sh [--dry-run]
#
#   LUDUS_HOME     the clone                    (default: the clone that contains this script)
#   LUDUS_EXTRAS   extras to install            (default: all,s3)
#   LUDUS_UNITS    running units to restart, separated by spaces  (default: ludus-*.service)
#
# Runs finish their step and save before the restart. If pulling or installing fails, nothing is
# restarted, and the next call tries again: .git/ludus-installed names the installed commit. Local
# commits are never merged.
set -euo pipefail

dry_run=false
case ${1:-} in
--dry-run) dry_run=true ;;
"") ;;
*)
    echo "update.sh: unknown argument '$1': update.sh [--dry-run]" >&2
    exit 2
    ;;
esac
home=${LUDUS_HOME:-$(dirname "$(dirname "$(readlink -f "$0")")")}
if ! git -C "$home" rev-parse --git-dir >/dev/null 2>&1; then
    echo "update.sh: LUDUS_HOME: $home is no git clone" >&2
    exit 2
fi
cd "$home"

run() {
    printf '%q ' "$@"
    echo
    $dry_run || "$@"
}

installed=$(git rev-parse --absolute-git-dir)/ludus-installed
if [[ ! -f $installed ]] && ! $dry_run; then
    git rev-parse HEAD >"$installed"
fi
run git pull --ff-only
if ! $dry_run && [[ $(git rev-parse HEAD) == "$(<"$installed")" ]]; then
    echo "update.sh: nothing is new"
    exit 0
fi
run .venv/bin/python -m pip install --quiet --disable-pip-version-check \
    -c constraints.txt -e ".[${LUDUS_EXTRAS:-all,s3}]"
run .venv/bin/ludus --version
read -ra units <<<"${LUDUS_UNITS:-ludus-*.service}"
run systemctl try-restart "${units[@]}"
if ! $dry_run; then
    git rev-parse HEAD >"$installed"
fi
