# SPDX-License-Identifier: Apache-2.0
"""Errors of neuronx-cc and the Neuron runtime that were reported from trn1 and inf2: what to do. Imports no torch.

The reports are in docs/device_facts.md; none of them was seen by this project. Texts are matched as the library raises
them or as the compiler logs them.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOG = "log-neuron-cc.txt"  # the compiler's own, in its working folder
LOG_BYTES = 1 << 16  # of a log's end


class Known(NamedTuple):
    """A text that an error has, and the advice; the advice may name the text's groups."""

    pattern: str
    advice: str


KNOWN = (
    Known(
        r"Got a cached failed neff at (?P<neff>\S+?)[.,]?(?:\s|$)",
        "the compiler failed on this graph before, and that was cached in {folder}: put right what failed, then "
        "remove that folder or set NEURON_CC_FLAGS=--retry_failed_compilation, and compile again",
    ),
    Known(
        r"NCC_INLA001",
        "neuronx-cc cannot place an operation: reported for the attention kernel with contexts of 4096 tokens or more; "
        "leave --attn-kernel (attn_kernel_enabled) out",
    ),
    Known(
        r"NCC_ITEN404",
        "reported for prefix caching with SDK 2.28 (aws-neuron-sdk #1304): leave --is-prefix-caching out (with vLLM "
        "--no-enable-prefix-caching), or use SDK 2.31",
    ),
    Known(
        r"NCC_IXCG856|MATCH_REPLACE8",
        "reported for token generation of models with 8 KV heads at TP 2, inf2 with SDK 2.28 (aws-neuron-sdk #1303): "
        "try another --tp or SDK 2.31",
    ),
    Known(
        r"NCC_EOOM00\d",
        "the graph needs more memory than a NeuronCore has: raise --tp, or lower --batch-size, --seq-len or "
        "--max-context-length; scripts/plan.py tells what fits",
    ),
    Known(
        r"\bF134\b|InstRangeSelect",
        "neuronx-cc broke off: reported for long context buckets on inf2 (aws-neuron-sdk #1365). Use shorter "
        "--context-encoding-buckets or --windowed-context-encoding-size",
    ),
    Known(
        r"\bNRT_EXEC_OOB\b|\bstatus(?:_code)?\W{0,3}1006\b",
        "the graph reads or writes outside its memory: reported for a cache of 32 requests of 2048 tokens, and "
        "where seq_len was not the length that the server used. Compile for fewer requests, with --max-context-length "
        "equal to --seq-len",
    ),
    Known(
        r"\bNRT_RESOURCE\b|\bstatus(?:_code)?\W{0,3}4\b|(?i:out of device memory|failed to allocate \S+ bytes on)",
        "the NeuronCores' memory is full; /tmp/neuron_mem_table_*.log says of what. Stop what else uses them "
        "(neuron-ls), raise --tp, or lower --batch-size or --seq-len",
    ),
    Known(
        r"\bNRT_EXEC_HW_ERR_COLLECTIVES\b|\bstatus(?:_code)?\W{0,3}1200\b|Failed to schedule neff execution",
        "the cores lost each other, and the runtime may be stuck: end all processes that use them; where the next run "
        "fails, too, reboot",
    ),
)  # fmt: skip


def advice_on(text: str) -> str | None:
    """Returns what to do about the first known error in `text`, as one line; None where there is none."""
    for known in KNOWN:
        found = re.search(known.pattern, text)
        if found:
            neff = found.groupdict().get("neff")
            return known.advice.format(folder=neff and str(Path(neff).parent))
    return None


def advice_on_error(error: BaseException, began: float) -> str | None:
    """Returns `advice_on` an error, its causes or the logs that the compiler wrote since `began` (time.time())."""
    texts = []
    cause: BaseException | None = error
    while cause is not None and len(texts) < 10:
        texts.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    return next((advice for text in (*texts, *_logs(began)) if (advice := advice_on(text))), None)


def _logs(began: float) -> Iterator[str]:
    """The ends of the compiler's logs in the library's working folder, the latest first."""
    folder = Path(os.environ.get("BASE_COMPILE_WORK_DIR", "/tmp/nxd_model/"))
    logs = [(path.stat().st_mtime, path) for path in folder.rglob(LOG)]
    for changed, path in sorted(logs, reverse=True):
        if changed >= began:
            yield path.read_bytes()[-LOG_BYTES:].decode(errors="replace")
