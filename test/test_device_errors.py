"""machine/device_errors.py on texts of the shape that was reported: each is recognised, any other is left alone."""

import os
import subprocess
import sys
import time

import pytest
from places import ROOT

from smollm3_neuron.machine.device_errors import KNOWN, advice_on, advice_on_error

HEAD = "2026-07-31T10:12:13Z ERROR 4242 [neuronx-cc]: "
TEXTS = {
    "attn_kernel_enabled": HEAD + "[NCC_INLA001] Unhandled exception: checkDMATranspose: attention_cte: transpose "
    "only supported for HBM->SB",
    "--no-enable-prefix-caching": HEAD + "[NCC_ITEN404] Internal tensorizer error: PGAnalysisForTiling",
    "#1303": HEAD + "[NCC_IXCG856] MATCH_REPLACE8 needs at least 8 elements per partition",
    "scripts/plan.py": HEAD + "[NCC_EOOM002] Memory usage 21474836480 bytes exceeds HBM limit of 17179869184 bytes",
    "--windowed-context-encoding-size": "[F134] neuronx-cc terminated abnormally - please open a support ticket",
    "--max-context-length equal": "RuntimeError: Failed to execute: nrt_execute status=1006, Out of bounds access",
    "neuron_mem_table": "nrt_load_collectives failed: NRT_RESOURCE (status_code=4): Allocation Failure",
    "reboot": "nrt_execute failed, status: 1200 NRT_EXEC_HW_ERR_COLLECTIVES",
    "/var/tmp/cache/neuronxcc-2.23/MODULE_7+a1": "Got a cached failed neff at /var/tmp/cache/neuronxcc-2.23/MODULE_7+a1"
    "/model.neff. Will skip compilation, please set --retry_failed_compilation for recompilation",
}
UNKNOWN = [
    "", "IndexError: list index out of range", HEAD + "[NCC_XYZ001] something new", "status=40", "status 10061",
    "Compiler status PASS", "RuntimeError: shape mismatch at 1006", "out of memory on the host",
]  # fmt: skip


@pytest.mark.parametrize("named", TEXTS)
def test_a_known_error_is_recognised(named):
    advice = advice_on(f"Traceback (most recent call last):\n  ...\n{TEXTS[named]}\nsome more lines")
    assert advice and named in advice and "\n" not in advice


def test_every_row_has_its_text():
    assert len({advice_on(text) for text in TEXTS.values()}) == len(KNOWN) == len(TEXTS)


@pytest.mark.parametrize("text", UNKNOWN)
def test_an_unknown_error_is_left_alone(text):
    assert advice_on(text) is None


def test_causes_are_looked_at(monkeypatch, tmp_path):
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path))
    try:
        try:
            raise RuntimeError("[NCC_INLA001] below")
        except RuntimeError as cause:
            raise ValueError("compilation failed") from cause
    except ValueError as error:
        assert "attn_kernel_enabled" in advice_on_error(error, time.time())


def test_the_compilers_log_is_looked_at(monkeypatch, tmp_path):
    log = tmp_path / "context_encoding_model/_tp0_bk0/log-neuron-cc.txt"
    log.parent.mkdir(parents=True)
    monkeypatch.setenv("BASE_COMPILE_WORK_DIR", str(tmp_path))
    log.write_text("x" * 100_000 + "\n" + TEXTS["scripts/plan.py"])
    error = RuntimeError("neuronx-cc failed with exit code 70")
    assert "scripts/plan.py" in advice_on_error(error, time.time() - 60)
    os.utime(log, (0, 0))  # of another day's compile
    assert advice_on_error(error, time.time() - 60) is None


@pytest.mark.parametrize(
    "text, last", [("[NCC_INLA001] kernel", "error: neuronx-cc cannot place"), ("new", "RuntimeError: new")]
)
def test_a_command_appends_it_to_the_error(text, last, tmp_path):
    program = f"import common\ndef main(): raise RuntimeError({text!r})\ncommon.run(main)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts"), "BASE_COMPILE_WORK_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    lines = done.stderr.strip().splitlines()
    assert f"RuntimeError: {text}" in lines and lines[-1].startswith(last)
