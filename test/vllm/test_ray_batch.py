"""scripts/batch.py on a Ray cluster: every row is answered once, with transformers' tokens, though engines die."""

import json
import subprocess
import sys
import time

import pytest
from cluster import SETTINGS, Cluster, Memory, engines, kill, wait_for
from places import ROOT, TINY
from serving import artifact_command
from test_ray_serving import expected

pytestmark = pytest.mark.ray
VLLM = ("0.13",)
ROWS = 2000
PROMPTS = [f"{a}+{b}=" for a in range(10) for b in range(10)]
NEW_TOKENS = 6


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_2000_rows_though_a_worker_is_killed_twice(release, vllm_neuron, tmp_path):
    command = artifact_command(TINY, SETTINGS, release, vllm_neuron, tmp_path)
    rows = [dict(id=f"row-{n}", prompt=PROMPTS[n % len(PROMPTS)], max_tokens=NEW_TOKENS) for n in range(ROWS)]
    given, output = tmp_path / "rows.jsonl", tmp_path / "answers.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Cluster(release, vllm_neuron, tmp_path / "c") as cluster:
        arguments = [given, output, "--artifact", command[0].partition("=")[2], "--replicas", "2"]
        with open(tmp_path / "log", "w") as log:
            script = [sys.executable, ROOT / "scripts" / "batch.py", *arguments]
            process = subprocess.Popen(script, env=cluster.env, stdout=log, stderr=log)
        with Memory(engines) as memory:
            for answered in (ROWS // 5, ROWS // 2):
                wait_for(lambda count=answered: len(lines(output)) >= count or process.poll() is not None, "progress")
                assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
                kill(engines()[0])
                time.sleep(1)
            assert process.wait(600) == 0, (tmp_path / "log").read_text()[-3000:]
    answers = lines(output)
    assert sorted(answer["id"] for answer in answers) == sorted(row["id"] for row in rows)
    wanted = {prompt: expected(prompt, NEW_TOKENS) for prompt in PROMPTS}
    assert {answer["id"]: answer["text"] for answer in answers} == {row["id"]: wanted[row["prompt"]] for row in rows}
    (summary,) = (line for line in (tmp_path / "log").read_text().splitlines() if line.startswith(f"{ROWS} rows: "))
    assert summary.startswith(f"{ROWS} rows: {ROWS} answered, 0 answered before, 0 bad; ")
    print(f"\n{summary}; {memory}")


def test_engines_that_do_not_start_are_one_line(release, vllm_neuron, tmp_path):
    command = artifact_command(TINY, SETTINGS, release, vllm_neuron, tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    config = tmp_path / "checkpoint" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 5.0}))
    with Cluster(release, vllm_neuron, tmp_path / "c") as cluster:
        arguments = ["rows.jsonl", "answers.jsonl", "--artifact", command[0].partition("=")[2], "--replicas", "1"]
        script = [sys.executable, ROOT / "scripts" / "batch.py", *arguments]
        done = subprocess.run(script, env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "error: NEURON_COMPILED_ARTIFACTS=" in done.stderr and "the one to be served has 5.0" in done.stderr
    assert not (tmp_path / "answers.jsonl").exists()
