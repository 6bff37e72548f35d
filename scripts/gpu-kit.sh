#!/usr/bin/env bash
# Collects the wheels that a bare GPU machine lacks into gpu-kit/, at the versions of constraints.txt:
# CPython 3.12, Linux, x86-64. `make gpu` installs them there, without a network. The machine itself
# has torch, transformers, peft, numpy, scipy and statsmodels: they are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
limit_mb=55 # of wheels and checkout together: what can be carried along

read -ra pins < <(.venv/bin/python scripts/write_constraints.py \
    'ludus-rl[envs,serve,remote]' hypothesis pytest-asyncio pytest-timeout)
wheels=()
for pin in "${pins[@]}"; do
    [[ $pin == numpy==* ]] || wheels+=("$pin")
done
rm -rf gpu-kit
mkdir gpu-kit
.venv/bin/python -m pip download --quiet --quiet --disable-pip-version-check --dest gpu-kit \
    --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux2014_x86_64 "${wheels[@]}"
if ! .venv/bin/python benchmarks/kernels_gpu.py --prepare gpu-kit/kernels.json; then
    echo "no CUDA kernels in the kit: see above" >&2
fi
bytes=$(($(git archive HEAD | wc -c) + $(cat gpu-kit/* | wc -c)))
echo "gpu-kit/: ${#wheels[@]} wheels; with the checkout $((bytes / 1000000)) MB"
[[ $bytes -lt $((limit_mb * 1000000)) ]] || {
    echo "over $limit_mb MB: leave out what gpu.sh does not need" >&2
    exit 1
}
