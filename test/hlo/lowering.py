"""What is lowered and run in test_hlo.py: cells, jobs and runs, see contrib/neuron_hlo."""

import json
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from places import CONTRIB, ROOT

from nxd_sources.release import Release

HERE = Path(__file__).resolve().parent
VENV = ROOT / ".venv-hlo"
NEW_TOKENS = 24
PROCESSES = 2
TWINS = {
    "WrongSchedule": {"schedule"},
    "DroppedCosSin": {"waves"},
    "SwappedKeysAndValues": {"projection"},
    "ReadsAValue": {"fallback", "execution"},
    "TensorFromOutside": {"constant"},
    "MissingAlias": {"alias"},
}


@dataclass(frozen=True)
class Cell:
    """One configuration; `options` are NeuronConfig's keywords beside these."""

    checkpoint: str
    tp: int
    fused: bool = False
    batch: int = 2
    label: str = ""
    dtype: str = "float32"
    seq_len: int = 128
    options: dict = field(default_factory=dict, hash=False)

    @property
    def runs(self) -> bool:
        """Whether it is run, too. The block tables of prefix caching are not made up here: test_features.py runs it;
        8,192 tokens take minutes."""
        return not self.options.get("is_prefix_caching") and self.seq_len <= 4096

    @property
    def name(self) -> str:
        words = [self.checkpoint, f"tp{self.tp}", "fused" if self.fused else "split", self.label, self.dtype]
        return "-".join(word for word in words if word and word != "float32")

    @property
    def neuron(self) -> dict:
        return {
            "tp_degree": self.tp,
            "batch_size": self.batch,
            "seq_len": self.seq_len,
            "torch_dtype": self.dtype,
            "fused_qkv": self.fused,
            **self.options,
        }


GREEDY = {"on_device_sampling": {"do_sample": False, "top_k": 1}}
CONTINUOUS = {"is_continuous_batching": True, "ctx_batch_size": 1}
BUCKETS = {"enable_bucketing": True}
PREFIX_CACHING = {
    **CONTINUOUS,
    "is_prefix_caching": True,
    "is_block_kv_layout": True,
    "pa_block_size": 32,
    "pa_num_blocks": 16,
}
SEQUENCE_PARALLEL = {"sequence_parallel_enabled": True}
PADDED = {"padded_intermediate_size": 240}
SPECULATION = {length: {"speculation_length": length} for length in (4, 7)}
PER_CHANNEL = {"quantized": True, "quantization_type": "per_channel_symmetric"}

CELLS = [
    *[Cell("tiny", tp, fused, batch=1) for tp in (1, 2, 4, 8) for fused in (False, True)],
    *[Cell("plain", tp, fused) for tp in (3, 5, 6, 7) for fused in (False, True)],
    *[Cell("plain", tp, label="sampling", options=GREEDY) for tp in (2, 3, 8)],
    Cell("plain", 2, label="sequence-parallel", options=SEQUENCE_PARALLEL),
    Cell("plain", 8, fused=True, label="sequence-parallel", options=SEQUENCE_PARALLEL),
    Cell("plain", 3, label="sequence-parallel", options=SEQUENCE_PARALLEL, seq_len=126),
    Cell("plain", 2, label="buckets", options=BUCKETS, seq_len=256),
    Cell("plain", 2, label="continuous", options=CONTINUOUS),
    Cell("plain", 2, label="seq-ids-mask", options={**CONTINUOUS, "apply_seq_ids_mask": True}),
    Cell(
        "plain",
        4,
        fused=True,
        label="all",
        options={**GREEDY, **CONTINUOUS, **BUCKETS, **SEQUENCE_PARALLEL},
        seq_len=256,
    ),
    Cell("plain", 2, label="vocab-parallel", options={"vocab_parallel": True}),
    Cell("odd-vocabulary", 4, label="vocab-parallel", options={"vocab_parallel": True}),
    Cell("plain", 2, label="async", options={"async_mode": True, **GREEDY}),
    Cell("plain", 2, label="windowed-context", options={"windowed_context_encoding_size": 16}),
    Cell("plain", 2, label="prefix-caching", options=PREFIX_CACHING, seq_len=256),
    *[Cell("plain", tp, fused=tp == 8, label="padded", options=PADDED) for tp in (1, 2, 3, 4, 8)],
    Cell("plain", 2, label="padded-int8-channel", options={**PADDED, **PER_CHANNEL}),
    # without attn_kernel_enabled False the library would take a kernel from 4,096 tokens on
    Cell("8192-positions", 2, batch=1, label="4096-tokens", seq_len=4096),
    Cell("8192-positions", 2, batch=1, label="8192-tokens", seq_len=8192),
    Cell(
        "8192-positions",
        2,
        label="prefix-caching-4096-tokens",
        seq_len=4096,
        options={**PREFIX_CACHING, "pa_num_blocks": 256},
    ),
    *[Cell(name, 2, label="rope-float64", options={"rope_precision": "float64"}) for name in ("plain", "yarn")],
    *[Cell("plain", 2, label=f"speculation-{length}", options=of) for length, of in SPECULATION.items()],
    Cell("plain", 3, label="speculation-7", options={**SPECULATION[7], **CONTINUOUS}),
    Cell("plain", 2, label="speculation-4-sampling", options={**SPECULATION[4], **GREEDY}),
    # the context encoding graph has as many tokens as are verified
    Cell("plain", 2, label="speculation-short-context", options={"speculation_length": 17, "max_context_length": 17}),
    Cell("plain", 2, label="short-context", options={"max_context_length": 40}),
    Cell("odd-vocabulary", 4),
    Cell("odd-vocabulary", 2, label="sampling", options=GREEDY),
    Cell("negative", 3),
    Cell("negative", 3, label="sampling", options=GREEDY),
    Cell("listed", 2),
    Cell("yarn", 2),
    Cell("linear", 2),
    Cell("llama3", 2),
    Cell("untied", 2),
    Cell("biases", 2, fused=True),
    Cell("9-heads-3-kv", 2),
    Cell("one-token", 2, batch=1),
    Cell("plain", 2, label="int8", options={"quantized": True}),
    Cell("plain", 8, fused=True, label="int8-channel", options=PER_CHANNEL),
    Cell("untied", 2, label="f8e4m3", options={"quantized": True, "quantization_dtype": "f8e4m3"}),
    Cell(
        "plain",
        3,
        fused=True,
        label="f8e4m3-channel",
        options={**PER_CHANNEL, "quantization_dtype": "f8e4m3", "modules_to_not_convert": ["lm_head"]},
    ),
    Cell("plain", 2, dtype="bfloat16"),
    Cell("plain", 8, fused=True, dtype="bfloat16"),
]
SHORTENED = {
    "tiny-tp2-split",
    "tiny-tp8-fused",
    "plain-tp3-split",
    "plain-tp5-fused",
    "plain-tp3-split-sampling",
    "plain-tp2-split-sequence-parallel",
    "plain-tp2-split-buckets",
    "plain-tp2-split-padded",
    "plain-tp2-split-speculation-4",
    "8192-positions-tp2-split-4096-tokens",
    "plain-tp2-split-bfloat16",
    "plain-tp2-split-int8",
    "plain-tp3-fused-f8e4m3-channel",
}
# NxDI's own Llama beside the sequence-parallel cells: what its collectives are
LLAMA = "neuronx_distributed_inference.models.llama.modeling_llama:NeuronLlamaForCausalLM"


def cells_of(release: Release) -> list[Cell]:
    return CELLS if release.version.startswith("0.8") else [cell for cell in CELLS if cell.name in SHORTENED]


def missing() -> str | None:
    """Why nothing can be lowered here."""
    if not (VENV / ".installed").exists() or not any(VENV.glob("lib/python*/site-packages/jax")):
        return "needs .venv-hlo, with jax in it: make hlo-venv"


def prompts_of(cell: Cell) -> list[list[int]]:
    if cell.checkpoint == "one-token":
        return [[11]]
    if cell.checkpoint == "8192-positions":
        return [[(7 + 31 * i + i * i) % 255 + 1 for i in range(4000)]]
    if cell.checkpoint == "tiny":
        from reference import tiny_prompts

        return tiny_prompts()[-cell.batch :]
    return [[7, 3, 201, 90, 14], [5, 9, 33, 121, 200, 17, 61, 2, 88, 150, 34, 99, 240, 18, 77, 45, 6]][: cell.batch]


def drafts_of(expected: list[list[int]]) -> list[list[int]]:
    """What could be looked up in the place of each answer: right but for some tokens, other ones in each row."""
    return [
        [token if at % (3 + row) else token + 1 for at, token in enumerate(tokens)]
        for row, tokens in enumerate(expected)
    ]


def call(python: Path, command: list, log: Path, timeout: float, **environment) -> None:
    """In a process group of its own, which ends with it."""
    with open(log, "w") as file:
        process = subprocess.Popen(
            [python, *command], stdout=file, stderr=file, start_new_session=True, env={**os.environ, **environment}
        )
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise RuntimeError(f"{command} ended with {code}:\n{log.read_text()[-6000:]}")


def lower(release: Release, jobs: list[dict], out: Path, timeout: float = 900) -> dict[str, dict]:
    """Facts by job name."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "jobs.json").write_text(
        json.dumps(
            {
                "sources": [release.nxd, release.nxdi],
                "paths": [str(HERE)],
                "out": str(out),
                "processes": PROCESSES,
                "jobs": jobs,
            }
        )
    )
    command = ["-m", "neuron_hlo.lower", str(out / "jobs.json")]
    call(VENV / "bin/python", command, out / "log", timeout, PYTHONPATH=str(CONTRIB))
    return {job["name"]: json.loads((out / job["name"] / "facts.json").read_text()) for job in jobs}


def run(runs: list[dict], out: Path, timeout: float = 900) -> dict[str, dict]:
    """Results of run_xla.py by name; a run whose shards are missing fails alone."""
    for one in runs:
        one["result"] = str(out / f"{one['name']}.run.json")
    (out / "runs.json").write_text(json.dumps({"processes": PROCESSES, "runs": runs}))
    call(
        VENV / "bin/python", [str(CONTRIB / "neuron_hlo/run_xla.py"), str(out / "runs.json")], out / "runs.log", timeout
    )
    return {one["name"]: json.loads(Path(one["result"]).read_text()) for one in runs}
