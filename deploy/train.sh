#!/usr/bin/env bash
# Trains until the run is complete, wherever it is started: in a container, by systemd, as a
# serverless job. The same command on a fresh machine goes on from the mirror.
#
#   train.sh [--dry-run] RECIPE [key=value ...]
#
#   LUDUS_MIRROR     where the run's copy lives: s3://BUCKET/FOLDER, file:///FOLDER  (required)
#   LUDUS_RUNS_DIR   where it works; may be lost with the machine   (default: runs)
#   LUDUS_GRACE_S    seconds that a step has to end after SIGTERM   (default: 20)
#   LUDUS            the command                                    (default: ludus)
#
# Exit codes, for those who start it again on failure:
#   0    complete, or its budget is spent: not to be started again
#   75   stopped by SIGTERM or SIGINT, with a checkpoint: to be started again
#   2    the recipe or a setting is wrong: starting again does not help
#   else it broke: starting again may help
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
    echo "train.sh: LUDUS_MIRROR is not set: where is the run's copy to live? s3://BUCKET/FOLDER" >&2
    exit 2
fi
grace_s=${LUDUS_GRACE_S:-20}
if [[ ! $grace_s =~ ^[0-9]+$ ]]; then
    echo "train.sh: LUDUS_GRACE_S is a whole number of seconds, not '$grace_s'" >&2
    exit 2
fi
command=("${LUDUS:-ludus}" train "$@"
    "mirror=$LUDUS_MIRROR" "runs_dir=${LUDUS_RUNS_DIR:-runs}")

if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    # `plan` reads the recipe with all its settings, and says what it would take.
    exec "${LUDUS:-ludus}" plan "${command[@]:2}"
fi

# Bash lets background jobs ignore SIGINT, by which the run is told to save: monitor mode does not.
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
    kill -0 "$child" 2>/dev/null || break # else a signal ended the waiting, not the run
done
[[ -n ${timer:-} ]] && kill "$timer" 2>/dev/null || true

case $code in
0) echo "train.sh: complete" ;;
3)
    echo "train.sh: the budget is spent; raise it in the settings to go on"
    code=0
    ;;
130) code=75 ;;
esac
exit "$code"
