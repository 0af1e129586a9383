"""scripts/accept.sh, and asking a server as one of its steps does."""

import json
import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

from smollm3_neuron.errors import SmolLM3Error

SERVER = """
import http.server, json, sys, time
began = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, code, body=b""):
        self.send_response(code); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer(200 if time.monotonic() - began > 1 else 503)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = sys.argv[2] if asked["prompt"] == "The square root of 144 is" and asked["model"] == "folder" else "?"
        self.answer(200, json.dumps({"choices": [{"text": text}]}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize("answer, right", [(" 12.", True), (" 13.", False)])
def test_a_server_is_asked_once_it_is_healthy(answer, right, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import acceptance

    (tmp_path / "server.py").write_text(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"exec {sys.executable} {tmp_path}/server.py {port} '{answer}'"
    if right:
        found = acceptance.ask_server(command, port, "folder", timeout=60)
        assert found["answer"] == answer and found["seconds_to_health"] >= 1
    else:
        with pytest.raises(SmolLM3Error, match="the server answers .* with ' 13.', 12 is not in it"):
            acceptance.ask_server(command, port, "folder", timeout=60)
    with pytest.raises(OSError):  # it is gone
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_server_that_ends_or_is_never_healthy(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import acceptance

    with pytest.raises(SmolLM3Error, match="the server ended with 7"):
        acceptance.ask_server("exit 7", 1, "folder")
    with pytest.raises(SmolLM3Error, match="was not healthy after 2 s"):
        acceptance.ask_server("sleep 60", 1, "folder", timeout=2)


def test_the_absolute_error_of_float32_logits(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import acceptance
    from places import TINY

    from smollm3_neuron.artifact.build import compile_artifact
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.machine.runtime import ensure_neuronx

    ensure_neuronx()
    compile_artifact(TINY, tmp_path / "artifact", Settings(seq_len=96, torch_dtype="float32"), "cpu")
    asked = ["acceptance.py", "float32", str(tmp_path / "artifact"), "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", [*asked, "--device", "cpu"])
    acceptance.main()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["tokens"] == 78 and 0 < found["mean"] < found["maximum"] < 1e-4
    monkeypatch.setattr(acceptance, "PUBLISHED_ERRORS", {"maximum": found["maximum"] / 2})
    with pytest.raises(SmolLM3Error, match="the maximum error of the logits is .* is allowed"):
        acceptance.main()


@pytest.mark.slow
def test_accept_goes_on_where_it_stopped(tmp_path):
    command = ["bash", ROOT / "scripts/accept.sh", "--device", "cpu", "--model", "tiny", "--tp", "1", "--seq-len", "64"]
    command += ["--float32", "--output", tmp_path / "results"]

    def accept(*more) -> subprocess.CompletedProcess:
        import os

        environment = {**os.environ, "PYTHON": sys.executable}
        return subprocess.run([*command, *more], capture_output=True, text=True, env=environment, timeout=600)

    results = tmp_path / "results"
    (results / "benchmark-2.json").mkdir(parents=True)  # what the seventh step cannot write over
    stopped = accept()
    assert stopped.returncode == 1 and "benchmark-2: failed with exit code" in stopped.stderr, (
        stopped.stdout + stopped.stderr
    )
    (results / "benchmark-2.json").rmdir()
    # what a device's runtime and compiler leave behind
    (results / "compiler/token_generation_model").mkdir(parents=True)
    (results / "compiler/token_generation_model/log-neuron-cc.txt").write_text("compiled")
    table = Path(f"/tmp/neuron_mem_table_of_{tmp_path.name}.log")
    table.write_text("16 GB")
    try:
        done = accept("--try-padding")
    finally:
        table.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "done before" in line] == [
        "environment: done before",
        "compile: done before",
        "generate: done before",
        "validate: done before",
        "float32: done before",
        "benchmark-1: done before",
    ]
    assert lines[-2].startswith("| a CPU, ") and "| identical | 57 of 57 |" in lines[-2]
    assert "12" in (results / "generate.log").read_text()
    assert sorted(file.name for file in (results / "logs").iterdir()) == [
        table.name,
        "token_generation_model-log-neuron-cc.txt",
    ]
    times = [line for line in lines if line.endswith("ms a token")]
    assert [line.split()[0] for line in times] == ["unpadded", "padded-1024", "padded-4096"]
    assert any(line.startswith("fastest: ") for line in lines)
    shared = (results / "report.json").read_text()
    assert not any(name in shared for name in (platform.node(), str(tmp_path), str(ROOT), str(Path.home())))
    assert set(json.loads(shared)["measured"]) == {"benchmark", "padded-1024", "padded-4096"}
    page = (results / "benchmark-1.html").read_text()
    assert page.count("<svg") == 2 and page.count("<tr>") == 4
    rows = json.loads((results / "benchmark-1.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == ["artifact", "transformers", "transformers, static cache"]
    assert rows[1]["decode_ratio"] == 1 and all(row["first_token"] > 0 and row["memory"] > 0 for row in rows)
    other = accept("--tp", "2")
    assert other.returncode == 2 and "choose another --output" in other.stderr
    assert json.loads(shared)["float32"]["tokens"] == 64
    both = accept("--dtype", "bfloat16")
    assert both.returncode == 2 and "--float32 and --dtype bfloat16: leave one out" in both.stderr
    assert accept("--tpp", "2").returncode == 2
