#!/usr/bin/env bash
# Sets up .venv-hlo: torch and torch_xla 2.9.0 (they lower), jax 0.7.1 (it runs what was lowered). About 2.9 GB.
# `make hlo-venv` calls it in the checkout's root; PYTHON chooses the interpreter, 3.10 to 3.12. Linux on x86-64, with gcc.
set -eu
PYTHON=${PYTHON:-python3}
here=$(dirname "$0")

for tool in gcc nm readelf; do
    command -v $tool > /dev/null || { echo "error: $tool is needed to stand in for torch's CUDA libraries" >&2; exit 2; }
done
pip() { .venv-hlo/bin/python -m pip install --quiet --no-input --disable-pip-version-check "$@" < /dev/null; }

$PYTHON -m venv --clear .venv-hlo
# first what asks for no torch, whose CUDA libraries would come with it
pip transformers==4.57.6 safetensors typing_extensions sympy networkx jinja2 absl-py protobuf boto3 tenacity scipy psutil \
    tqdm "setuptools>=77" jax==0.7.1 jaxlib==0.7.1
# torch_xla loads beside this torch alone, and PyPI has only its CUDA build: its big libraries are left out and stood in for
pip --no-deps torch==2.9.0 torch_xla==2.9.0 nvidia-cuda-runtime-cu12==12.8.90 nvidia-cuda-cupti-cu12==12.8.90 \
    nvidia-cufile-cu12==1.13.1.3 nvidia-nvtx-cu12==12.8.90 accelerate==1.15.0
packages=$(.venv-hlo/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
.venv-hlo/bin/python "$here/cuda_stubs.py" "$packages"
# the model's package, which is what is lowered
pip --no-deps --no-build-isolation -e .

.venv-hlo/bin/python -c 'import torch, torch_xla, jax' 2> /dev/null
touch .venv-hlo/.installed
