#!/usr/bin/env bash
# Train a run to completion: in a container, under systemd, or as a serverless job.
# The same command on a fresh machine resumes from the mirror.
#
#   train.sh [--dry-run] RECIPE [key=value ...]
#
#   LUDUS_MIRROR     URL of the run's copy: s3://BUCKET/FOLDER, file:///FOLDER  (required)
#   LUDUS_RUNS_DIR   working folder; its contents may be lost      (default: runs)
#   LUDUS_GRACE_S    seconds for a step to end after SIGTERM       (default: 20)
#   LUDUS            the command                                   (default: ludus)
#
# Exit codes, for restart policies:
#   0    complete, or the budget is spent: do not restart
#   75   stopped by SIGTERM or SIGINT, with a checkpoint: restart
#   2    the recipe or a setting is wrong: do not restart
#   else failure: a restart may help
set -euo pipefail

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
    dry_run=true
    shift
fi
if [[ $# -eq 0 || $1 == -* || $1 == *=* ]]; then
    echo "train.sh: give a recipe: train.sh [--dry-run] RECIPE [key=value ...]" >&2
    exit 2
fi
if [[ -z ${LUDUS_MIRROR:-} ]]; then
    echo "train.sh: LUDUS_MIRROR is not set: give the URL of the run's copy, s3://BUCKET/FOLDER" >&2
    exit 2
fi
grace_s=${LUDUS_GRACE_S:-20}
if [[ ! $grace_s =~ ^[0-9]+$ ]]; then
    echo "train.sh: LUDUS_GRACE_S must be a whole number of seconds, not '$grace_s'" >&2
    exit 2
fi
command=("${LUDUS:-ludus}" train "$@"
    "mirror=$LUDUS_MIRROR" "runs_dir=${LUDUS_RUNS_DIR:-runs}")

if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    # `plan` checks the recipe with all its settings and prints the estimate.
    exec "${LUDUS:-ludus}" plan "${command[@]:2}"
fi

# Bash makes background jobs ignore SIGINT, the signal to save; monitor mode does not.
set -m
"${command[@]}" &
child=$!
set +m

stopping=false
# shellcheck disable=SC2329  # the trap calls it
stop() { # once: finish the step and save; after the grace period, stop at once
    $stopping && return
    stopping=true
    kill -INT "$child" 2>/dev/null || return 0
    (
        sleep "$grace_s" &
        trap 'kill $!' TERM
        wait $! && kill -INT "$child" 2>/dev/null
    ) >/dev/null 2>&1 &
    timer=$!
}
trap stop TERM INT

code=0
while true; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break # else a signal interrupted `wait`; the run continues
done
[[ -n ${timer:-} ]] && kill "$timer" 2>/dev/null || true

case $code in
0) echo "train.sh: complete" ;;
3)
    echo "train.sh: the budget is spent; raise it in the settings to continue"
    code=0
    ;;
130 | 143) code=75 ;;
esac
exit "$code"
