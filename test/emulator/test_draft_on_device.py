"""A draft in one graph with the model, on the emulated device: the tokens are those of plain decoding, whoever guesses.

The graph is the library's own (NeuronFusedSpecModel). Needs --nxd-source and `make emulator-venv`; asked for with
-m emulator.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass, field

import pytest
import running
import torch
from cells import GREEDY, TWO
from places import ROOT, TINY
from reference import make_checkpoint, reference_model, reference_tokens
from test_features import CONTINUOUS, prompt
from transformers import LlamaConfig, LlamaForCausalLM

from smollm3_neuron.model.config import REQUIRED, read_config

pytestmark = pytest.mark.emulator
THREE = [*TWO, prompt(3, 2)]
ONE = [prompt(9)]


@dataclass(frozen=True)
class Cell:
    """One configuration: who guesses, how many tokens a step verifies, and NeuronConfig's other keywords."""

    name: str
    draft: str
    length: int
    neuron: dict = field(default_factory=dict)
    prompts: list = field(default_factory=lambda: TWO)
    checkpoint: str = "plain"
    new_tokens: int = 24
    kind: str = "answer"

    def job(self, checkpoints, **more):
        speculation = {"enable_fused_speculation": True, "speculation_length": self.length}
        shape = {"tp_degree": 2, "batch_size": 1, "seq_len": 128, "save_sharded_checkpoint": True}
        return {
            "name": self.name,
            "kind": self.kind,
            "checkpoint": checkpoints[self.checkpoint],
            "draft": checkpoints[self.draft],
            "neuron": {**shape, **GREEDY, **speculation, **self.neuron, "on_cpu": False},
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            **more,
        }

    def expected(self, checkpoints):
        """transformers' tokens, as far as a step still fits into the cache."""
        ends = self.neuron.get("seq_len", 128) - self.length + 2
        counts = [min(self.new_tokens, ends - len(row)) for row in self.prompts]
        checkpoint = checkpoints[self.checkpoint]
        return [reference_tokens(checkpoint, tuple(row), count, ()) for row, count in zip(self.prompts, counts)]


BUCKETS = {"enable_bucketing": True, "seq_len": 256}
CELLS = [
    Cell("random", "random", 4),
    Cell("itself", "plain", 4),
    Cell("close", "close", 7, {"batch_size": 2}),
    Cell("itself-batch", "plain", 4, {"batch_size": 3}, THREE),
    Cell("llama", "llama", 5, checkpoint="all-rope"),
    Cell("two-tokens-tp1", "close", 2, {"tp_degree": 1}),
    Cell("close-tp4-fused-qkv", "close", 5, {"tp_degree": 4, "fused_qkv": True}),
    Cell("itself-tp3", "plain", 4, {"tp_degree": 3}),
    Cell("random-tp8", "random", 4, {"tp_degree": 8}),
    Cell("close-buckets", "close", 4, BUCKETS, [prompt(120), prompt(9, 1)]),
    Cell("close-continuous", "close", 4, {**CONTINUOUS, "ctx_batch_size": 1}, THREE),
    Cell("padded", "close", 4, {"padded_intermediate_size": 240}),
    Cell("yarn", "close", 4, {"rope_precision": "float64"}, checkpoint="yarn"),
    Cell("to-the-end", "close", 6, {"seq_len": 48, "batch_size": 2}, [prompt(9), prompt(30, 1)], new_tokens=99),
]
# what the releases beside 0.8.0 run
CORE = {"random", "itself", "itself-batch", "close", "llama"}
# twin -> the cell that it breaks; whether the tokens are others
TWINS = {
    "one_is_accepted_too_far": ("random", True),
    "the_models_cache_is_not_rolled_over": ("itself", True),
    "draft_and_model_change_places": ("close", True),
    "the_drafts_cache_is_not_rolled_over": ("itself", False),
}


def cells_of(version: str) -> list[Cell]:
    return CELLS if version.startswith("0.8") else [cell for cell in CELLS if cell.name in CORE]


@pytest.fixture(scope="session")
def checkpoints(random_checkpoints, tmp_path_factory) -> dict[str, str]:
    """Folders by name: "random" is a smaller model, "close" is "plain" with a little noise, "llama" is "all-rope"."""
    folder = tmp_path_factory.mktemp("drafts")
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    make_checkpoint(folder / "random", **small, num_key_value_heads=2, tie_word_embeddings=False)
    model = reference_model.__wrapped__(random_checkpoints["plain"])
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    model.save_pretrained(folder / "close")
    save_llama(random_checkpoints["all-rope"], folder / "llama")
    return {**random_checkpoints, **{name: str(folder / name) for name in ("random", "close", "llama")}}


def save_llama(checkpoint, folder):
    """A Llama with the weights of a checkpoint without NoPE layers, as transformers saves it."""
    config = read_config(checkpoint)
    names = (*REQUIRED, "rope_theta", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings")
    model = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in names}))
    model.load_state_dict(reference_model(checkpoint).state_dict())
    model.save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


def pytest_generate_tests(metafunc):
    if "release" not in metafunc.fixturenames:
        return
    releases = metafunc.config.nxd_releases
    reason = running.missing() or (None if releases else "needs --nxd-source NXD_SRC:NXDI_SRC, the library's sources")
    skipped = [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="real-library")]
    metafunc.parametrize("release", skipped if reason else releases, ids=None if reason else lambda r: r.version)


@pytest.fixture(scope="session")
def results(checkpoints, tmp_path_factory):
    """Results by name of all jobs of a release, from one call of emulated.py; "out" is their folder."""
    kept = {}

    def get(release):
        if release not in kept:
            out = tmp_path_factory.mktemp(f"drafts-{release.version}")
            by_name = {cell.name: cell for cell in CELLS}
            jobs = [cell.job(checkpoints) for cell in cells_of(release.version)]
            jobs += [
                {**by_name[cell].job(checkpoints), "name": twin, "twin": twin} for twin, (cell, _) in TWINS.items()
            ]
            jobs.append({**by_name["llama"].job(checkpoints), "name": "shards", "kind": "shards"})
            jobs.append(
                {
                    **by_name["random"].job(checkpoints),
                    "name": "on-load",
                    "neuron": {**by_name["random"].job(checkpoints)["neuron"], "save_sharded_checkpoint": False},
                }
            )
            kept[release] = {**running.run(release, jobs, out), "out": out}
        return kept[release]

    return get


def test_tokens_are_those_of_plain_decoding(release, results, checkpoints):
    for cell in cells_of(release.version):
        result = results(release)[cell.name]
        assert "error" not in result, (cell.name, result["traceback"])
        print(f"{cell.name}: accepted of offered {result['accepted']}, executions {result['counts']}")
        assert result["tokens"] == cell.expected(checkpoints), cell.name


def test_a_draft_is_accepted_as_far_as_it_is_right(release, results):
    """The model as its own draft always, a Llama of the same weights too; a random one hardly ever.

    In a batch, too, where the library shows a row's draft the places of the others.
    """
    for name in ("itself", "llama", "itself-batch"):
        for accepted, offered in results(release)[name]["accepted"]:
            assert accepted == offered > 0, name
    (accepted, offered), (more, of) = results(release)["random"]["accepted"]
    assert accepted + more < 0.1 * (offered + of)
    for accepted, offered in results(release)["close"]["accepted"]:
        assert 0 < accepted < offered


def test_a_step_is_one_execution(release, results):
    """Of two prompts of 24 tokens, one at a time: the first token and 23 more, four in a step or one."""
    assert results(release)["itself"]["counts"] == {"forward": 2 * (1 + 6)}
    steps = 2 * 24 - sum(accepted for accepted, _ in results(release)["random"]["accepted"])
    assert results(release)["random"]["counts"] == {"forward": steps}


def test_what_is_broken_on_purpose_is_noticed(release, results, checkpoints):
    """A draft whose cache is lost guesses worse, and the tokens stay right: that shows in what is accepted alone."""
    for twin, (name, differs) in TWINS.items():
        result = results(release)[twin]
        assert "error" not in result, (twin, result["traceback"])
        (cell,) = (cell for cell in CELLS if cell.name == name)
        assert (result["tokens"] != cell.expected(checkpoints)) == differs, twin
        if not differs:
            accepted, offered = map(sum, zip(*result["accepted"]))
            assert accepted < 0.5 * offered, twin


def test_our_shards_are_the_librarys(release, results):
    """Byte for byte, model and draft in one file for each rank."""
    result, out = results(release)["shards"], results(release)["out"] / "shards"
    assert "error" not in result, result["traceback"]
    for rank in range(2):
        name = f"tp{rank}_sharded_checkpoint.safetensors"
        assert (out / "ours" / name).read_bytes() == (out / "artifact" / "weights" / name).read_bytes()


def test_the_librarys_sharder_on_load(release, results, checkpoints):
    result = results(release)["on-load"]
    assert "error" not in result, result["traceback"]
    assert result["tokens"] == next(cell for cell in CELLS if cell.name == "random").expected(checkpoints)


def test_commands(release, tmp_path):
    """compile.py --draft and generate.py: the answer of plain decoding, with a line that says what was accepted."""
    draft = tmp_path / "draft"
    shutil.copytree(TINY, draft)

    def run(script, *args):
        return subprocess.run(
            [running.PYTHON, ROOT / "scripts" / script, *args],
            capture_output=True, text=True, timeout=600, env=running.environment(release), cwd=ROOT,
        )  # fmt: skip

    artifact = tmp_path / "artifact"
    shape = ["--model", "tiny", "--tp", "2", "--seq-len", "64", "--dtype", "float32", "--output", artifact]
    done = run("compile.py", *shape, "--draft", draft, "--speculation-length", "4")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(draft)  # it is in the artifact
    done = run("generate.py", artifact, "7 * 8 =", "--max-new-tokens", "3")
    assert done.returncode == 0 and done.stdout == "7 * 8 = 56\n", done.stderr
    assert "candidates accepted (100%)" in done.stderr
    done = run("generate.py", artifact, "7 * 8 =", "--max-new-tokens", "99")
    assert "--max-new-tokens 99, but prompt 0 leaves" in done.stderr and "of 61" in done.stderr
    for script, args, message in (
        ("generate.py", ["7", "--prompt-lookup", "3"], "prompt_lookup is 3, but the model was compiled with a draft"),
        ("generate.py", ["7", "--temperature", "1"], "temperature is 1.0, but on_device_sampling_config is greedy"),
        ("validate.py", [], "the model was compiled with a draft: its graphs return the tokens"),
    ):
        done = run(script, artifact, *args)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 2 and message in last, (script, done.stderr)
