#!/usr/bin/env bash
# On a GPU machine without a network: installs the wheels of gpu-kit/ into a folder of their own, runs
# the GPU tests (3 minutes at most), then measures (9 minutes at most in all). Results are in $OUT,
# else in runs/gpu/. PYTHON chooses the interpreter. No setting of the card is changed.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-runs/gpu}
"$python" -c 'import torch' 2>/dev/null || {
    echo "$python has no torch: name a Python that has it, by PYTHON=/path/to/python" >&2
    exit 2
}
mkdir -p "$out"

if compgen -G 'gpu-kit/*.whl' >/dev/null; then
    packages=$(mktemp -d)
    trap 'rm -rf "$packages"' EXIT
    "$python" -m pip install --quiet --quiet --disable-pip-version-check \
        --no-index --no-deps --target "$packages" gpu-kit/*.whl
    export PYTHONPATH="$packages:$PWD"
else
    echo "no gpu-kit/ here (made by 'make gpu-kit'): using the installed packages" >&2
    export PYTHONPATH="$PWD"
fi

status=0
mapfile -t files < <(grep -rl --include='*.py' 'pytest.mark.gpu' tests)
timeout 180 "$python" -m pytest -m gpu -q -W default -p no:cacheprovider "${files[@]}" 2>&1 |
    tee "$out/tests.log" || status=$?
case $status in
0) ;;
124) echo "the GPU tests took over 3 minutes" >&2 ;;
*) echo "the GPU tests failed" >&2 ;;
esac
if [[ -f gpu-kit/kernels.json ]]; then # CUDA kernels: cubins that were made before, for no sandbox is here
    timeout 120 "$python" benchmarks/kernels_gpu.py --run gpu-kit/kernels.json --seconds 90 \
        --out "$out" 2>&1 | tee "$out/kernels.log" || status=1
fi
"$python" benchmarks/gpu.py --seconds $((520 - SECONDS)) --out "$out" "$@" || status=1
exit $status
