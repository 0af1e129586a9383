#!/usr/bin/env bash
# example: scripts/accept.sh --device cpu --model tiny --tp 1 --seq-len 64 --dtype float32
#
# Accepts this package on a machine: environment report, compile, generate, validate, benchmark, an answer of a vLLM
# server, and one folder that holds all results.
#
# what is compiled:
#   --model MODEL      hub id, folder or 'tiny' (default: HuggingFaceTB/SmolLM3-3B)
#   --tp N             tensor-parallel degree (default: 2)
#   --seq-len N        prompt and new tokens (default: 2048)
#   --dtype DTYPE      bfloat16, float16 or float32 (default: bfloat16)
#   --float32          --dtype float32, and the absolute error of the logits over 78 tokens is held to a published one
#
# where it runs and what is written:
#   --device DEVICE    neuron, cpu, or auto: the device where the Neuron SDK is installed (default: auto)
#   --output FOLDER    the folder of results (default: acceptance/MODEL-tpN)
#   --try-padding      measure two artifacts with padded MLPs, too, and say which was fastest
#
# A step that is done is not done again: after a failure, put right what it says and run the same command. Exit code 0:
# every step passed; 1: one failed, its log is named; 2: a mistake in the call. PYTHON names the interpreter (default:
# python).
set -euo pipefail
cd "$(dirname "$0")/.."

device=auto model=HuggingFaceTB/SmolLM3-3B tp=2 seq_len=2048 dtype=bfloat16 output= try_padding= float32=
while [ $# -gt 0 ]; do
    case $1 in
        --device | --model | --tp | --seq-len | --dtype | --output)
            [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
            name=${1#--} name=${name//-/_}
            printf -v "$name" %s "$2"
            shift 2 ;;
        --try-padding) try_padding=yes; shift ;;
        --float32) float32=yes dtype=float32; shift ;;
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        *) echo "error: $1 is unknown, allowed are --device --model --tp --seq-len --dtype --float32 --output --try-padding" >&2; exit 2 ;;
    esac
done
if [ "$float32" ] && [ "$dtype" != float32 ]; then
    echo "error: --float32 and --dtype $dtype: leave one out" >&2
    exit 2
fi
output=${output:-acceptance/$(basename "$model")-tp$tp}
python=${PYTHON:-python}
asked="--device $device --model $model --tp $tp --seq-len $seq_len --dtype $dtype"

mkdir -p "$output"
output=$(cd "$output" && pwd)
if [ -e "$output/asked" ] && [ "$(cat "$output/asked")" != "$asked" ]; then
    echo "error: $output has the results of $(cat "$output/asked"): choose another --output" >&2
    exit 2
fi
[ -e "$output/asked" ] || echo "$asked" > "$output/asked"
# what was compiled outlives a reboot, and the compiler's logs are kept with the results
export NEURON_COMPILE_CACHE_URL=${NEURON_COMPILE_CACHE_URL:-$(dirname "$output")/neuron-compile-cache}
export BASE_COMPILE_WORK_DIR=$output/compiler/

# step NAME COMMAND...: runs it once, its output in NAME.log
step() {
    local name=$1 code=0
    shift
    if [ -e "$output/$name.done" ]; then
        echo "$name: done before"
        return
    fi
    echo "$name: $*"
    "$@" > "$output/$name.log" 2>&1 || code=$?
    if [ "$code" -ne 0 ]; then
        "$python" scripts/acceptance.py collect "$output" || true
        tail -n 5 "$output/$name.log" >&2
        echo "$name: failed with exit code $code, see $output/$name.log; run the same command again to go on from here" >&2
        exit 1
    fi
    touch "$output/$name.done"
    tail -n 1 "$output/$name.log"
}

# measure NAME ARTIFACT: in three processes, of which the fastest counts, because one graph's steps differ between
# processes; only the first of benchmark is beside transformers, which takes long
measure() {
    local number alone
    for number in 1 2 3; do
        alone=--without-transformers
        [ "$1-$number" != benchmark-1 ] || alone=
        step "$1-$number" "$python" scripts/benchmark.py "$2" --device "$device" --prompt-lengths "$room" \
            --new-tokens "$room" --json "$output/$1-$number.json" --plot "$output/$1-$number.html" $alone
    done
}

room=$((seq_len < 192 ? seq_len / 3 : 64))
compile=("$python" scripts/compile.py --model "$model" --tp "$tp" --seq-len "$seq_len" --dtype "$dtype")
compile+=(--device "$device")
step environment "$python" scripts/acceptance.py environment --device "$device" --json "$output/environment.json"
step compile "${compile[@]}" --output "$output/artifact"
step generate "$python" scripts/generate.py "$output/artifact" "The square root of 144 is" --max-new-tokens 8 \
    --device "$device"
step validate "$python" scripts/validate.py "$output/artifact" --device "$device" --json "$output/validate.json" \
    --html "$output/validate.html"
[ -z "$float32" ] || step float32 "$python" scripts/acceptance.py float32 "$output/artifact" --device "$device" \
    --json "$output/float32.json"
measure benchmark "$output/artifact"
if [ "$try_padding" ]; then
    for size in $("$python" scripts/acceptance.py sizes "$output/artifact"); do
        step "compile-padded-$size" "${compile[@]}" --pad-intermediate "$size" --output "$output/artifact-padded-$size"
        measure "padded-$size" "$output/artifact-padded-$size"
    done
    "$python" scripts/acceptance.py fastest "$output"
fi
step vllm "$python" scripts/acceptance.py vllm "$output/artifact" --device "$device" --json "$output/vllm.json"
"$python" scripts/acceptance.py collect "$output"
step line "$python" scripts/acceptance.py line "$output"
"$python" scripts/acceptance.py report "$output" > "$output/report.json"
echo "results: $output; the row for docs/evidence.md is the one above; to share: $output/report.json, see CONTRIBUTING.md"
