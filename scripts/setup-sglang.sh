#!/usr/bin/env bash
# Makes .venv-sglang, an environment with SGLang on a CPU for `sampler: sglang`. Safe to run again.
#
# The release is the last one whose package has a CPU build's dependencies and no compiled part of its
# own. Its kernels for CPUs are built from source for AMX alone; without AMX it asks for vLLM's.
# scripts/sglang_cpu has stand-ins for both, with which SGLang computes with torch.
# The release asks for torch 2.7 on GPUs only; torch 2.13 is the one that ludus is tested with: see
# docs/installation.md where pip does not find its CPU build. timm is for images alone and brings
# torchvision, whose builds are for CUDA and break `import transformers` beside a torch for CPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

release=sglang==0.4.10.post2
torch=torch==2.13.0
shims=scripts/sglang_cpu
wanted="$release $torch $(find $shims -name '*.py' | sort | xargs cat | sha256sum | cut -c1-16)"
ready=.venv-sglang/.ready
[[ -f $ready && $(cat "$ready") == "$wanted" ]] && exit 0

echo "Installing $release into .venv-sglang (3 GB; some minutes)"
.venv/bin/python -m venv --clear .venv-sglang
python=.venv-sglang/bin/python
pip() { $python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
pip install --no-deps "$release"
$python - >.venv-sglang/requirements.txt <<'PYTHON'
import re
from importlib.metadata import requires

for line in requires("sglang"):
    package, _, marker = line.partition(";")
    extra = re.search(r'extra == "([\w-]+)"', marker)
    plain = extra is None or extra[1].replace("_", "-") in ("runtime-common", "srt-cpu")
    if plain and not package.startswith(("timm", "sglang[")):
        print(package)
PYTHON
pip install "$torch" triton -r .venv-sglang/requirements.txt
cp -r $shims/sgl_kernel $shims/vllm "$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
# Without these modules, SGLang would run the models of transformers, slowly and not all of them.
SGLANG_USE_CPU_ENGINE=1 $python -W ignore -c 'import sglang.srt.entrypoints.http_server, sglang.srt.models.qwen3, sglang.srt.models.llama'
echo "$wanted" >"$ready"
