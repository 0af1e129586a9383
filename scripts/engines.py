"""What benchmark.py measures: an artifact or transformers, each in a process of its own: python engines.py JOB

JOB, as JSON: {"engine": a name, "place", "threads", "dtype", "checkpoint", "adapter"}, and "artifact" (a folder) with
"prompt_lookup" (candidates of a step, or null) or "cache" (generate's cache_implementation) with "compile" (whether
torch.compile compiles the forward). The process loads the model and prints {"load": seconds}; then it answers each line
{"prompts": token ids, "new_tokens"} with {"first": seconds to the first token, "gaps": seconds between two, "memory":
bytes over what they were before loading}, and an artifact with how many candidates were "accepted" of those "offered".
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import common

from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.runtime import ensure_neuronx

PASSAGE = 20  # tokens

# a function of (prompts, number of new tokens, what to call at each new token) that may return more for the reply
Answer = Callable[[list[list[int]], int, Callable[[], None]], dict | None]


class Engine:
    """The process of one engine, as benchmark.py sees it. `load` is the seconds that loading took."""

    def __init__(self, name: str, job: dict):
        self.name = name
        command = [sys.executable, __file__, json.dumps({**job, "engine": name})]
        environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.load = self._reply()["load"]

    def measure(self, prompts: list[list[int]], new_tokens: int) -> dict:
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):  # a library may print, too
                return json.loads(line)
        raise SmolLM3Error(f"{self.name}: its process ended with code {self.process.wait()}; what it said is above")

    def close(self) -> None:
        self.process.stdin.close()


def load_artifact(job: dict) -> Answer:
    ensure_neuronx()
    from smollm3_neuron.generate.generation import generate

    model = open_artifact(Path(job["artifact"]), job["place"]).load()

    def answer(prompts, new_tokens, on_token):
        first = {"on_token": lambda row, token: on_token() if row == 0 else None}
        results = generate(model, prompts, new_tokens, **first, prompt_lookup=job["prompt_lookup"])
        return {name: sum(getattr(result, name) for result in results) for name in ("accepted", "offered")}

    return answer


def prompts_of(kind: str, length: int, rows: int, vocab_size: int) -> list[list[int]]:
    """Token ids: "free" ones repeat nothing, "copying" ones the same passage of a few tokens, another in each row."""
    last = vocab_size - 1
    free = [[(7 + 31 * position + 17 * row) % last + 1 for position in range(length)] for row in range(rows)]
    if kind == "free":
        return free
    passage = max(1, min(PASSAGE, length // 2))
    return [[row[position % passage] for position in range(length)] for row in free]


def load_transformers(job: dict) -> Answer:
    import torch
    from transformers.generation.streamers import BaseStreamer

    from smollm3_neuron.check.altered_reference import load_altered_reference

    model = load_altered_reference(job["checkpoint"], getattr(torch, job["dtype"]), job["adapter"])
    if job["compile"]:
        model.forward = torch.compile(model.forward)

    class Streamer(BaseStreamer):
        def __init__(self, on_token):
            self.on_token, self.is_prompt = on_token, True

        def put(self, value):
            if not self.is_prompt:
                self.on_token()
            self.is_prompt = False

        def end(self):
            pass

    def answer(prompts, new_tokens, on_token):
        input_ids = torch.tensor(prompts)
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            eos_token_id=None,
            pad_token_id=0,
            cache_implementation=job["cache"],
            streamer=Streamer(on_token),
        )

    return answer


def anonymous_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


def measure_once(answer: Answer, prompts: list[list[int]], new_tokens: int) -> dict:
    """Seconds to the first token and between two that follow each other."""
    import torch

    stamps: list[float] = []
    began = time.perf_counter()
    with torch.no_grad():
        more = answer(prompts, new_tokens, lambda: stamps.append(time.perf_counter()))
    gaps = [later - earlier for earlier, later in zip(stamps, stamps[1:])]
    return {"first": stamps[0] - began, "gaps": gaps, **(more or {})}


def main() -> None:
    job = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(job["threads"])
    common.quiet()
    load = load_artifact if "artifact" in job else load_transformers
    import transformers.models.smollm3.modeling_smollm3  # an import is no part of loading

    transformers.utils.logging.disable_progress_bar()

    memory, began = anonymous_memory(), time.perf_counter()
    answer = load(job)
    print(json.dumps({"load": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        times = measure_once(answer, **json.loads(line))
        print(json.dumps({**times, "memory": anonymous_memory() - memory}), flush=True)


if __name__ == "__main__":
    common.run(main)
