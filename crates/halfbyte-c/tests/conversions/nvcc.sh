#!/usr/bin/env bash
# The conversions compiled by nvcc for every processor that it knows of those named here, and run on the GPU of this machine.
# Exit status: 0 all is equal; 77 there is no nvcc, or no GPU, and it says which; else it is wrong.
set -euo pipefail
cd "$(dirname "$0")"
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
if [ ! -x "$nvcc" ]; then
    echo 'no nvcc: nothing compiled' >&2
    exit 77
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# bf16 begins with sm_80.
"$nvcc" --std=c++17 -Werror all-warnings -I ../../include \
    -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 nvcc.cu -o "$out/nvcc"
"$out/nvcc"
