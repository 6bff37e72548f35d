#!/usr/bin/env bash
# Tries a wheel as a user gets it: try-wheel.sh dist/*.whl. The first environment has the core only,
# the second the extras of the smallest recipe. pip takes their packages from its index.
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/python -m pip install --quiet "$wheel"
env/bin/ludus --version
env/bin/ludus recipes
env/bin/ludus doctor
code=0
env/bin/ludus train babyai-tiny 2>errors || code=$?
cat errors
[[ $code == 2 ]] && grep -q "pip install 'ludus-rl\[train\]'" errors
[[ ! -e runs ]]
env/bin/python -m pip install --quiet "${wheel}[train,envs]"
env/bin/ludus train babyai-tiny demonstrations.num_episodes=8 sft.steps=2 rl=null tasks.heldout=null
env/bin/ludus runs
