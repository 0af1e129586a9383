"""The compile path: the real library lowers the model up to the compiler, and what it would compile is right.

Needs --nxd-source and `make hlo-venv`; asked for with -m hlo.
"""

import json
import subprocess
import sys
from filecmp import cmpfiles
from pathlib import Path

import lowering
import numpy
import pytest
import torch
from lowering import NEW_TOKENS, TWINS, Cell, cells_of, drafts_of, prompts_of
from places import TINY
from reference import make_checkpoint, reference_tokens
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, SmolLM3ForCausalLM

from neuron_hlo.checks import faults
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.altered_reference import load_altered_reference
from smollm3_neuron.machine.roofline import Estimate
from smollm3_neuron.model.config import read_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B

pytestmark = pytest.mark.hlo
SAFETENSORS = {"I32": "S32", "I8": "S8", "F8_E4M3": "F8E4M3FN"}  # the names that differ from HLO's
TWIN = Cell("plain", 2)
NEURON_3B = {"tp_degree": 8, "batch_size": 1, "seq_len": 2048, "torch_dtype": "bfloat16"}


def pytest_generate_tests(metafunc):
    wanted = {"cell", "twin", "release"} & set(metafunc.fixturenames)
    if not wanted:
        return
    releases = metafunc.config.nxd_releases
    reason = lowering.missing() or (
        None if releases else "needs --nxd-source NXD_SRC:NXDI_SRC, the sources of the library"
    )
    names = ["release", *sorted(wanted - {"release"})]
    if reason:
        skipped = pytest.param(*[None] * len(names), marks=pytest.mark.skip(reason=reason), id="real-library")
        metafunc.parametrize(names, [skipped])
    elif "cell" in wanted:
        which = {
            test_bfloat16_is_off_by_no_more_than_transformers: lambda cell: cell.dtype == "bfloat16",
            test_tokens_equal_transformers: lambda cell: cell.dtype != "bfloat16" and cell.runs,
            # in windows everything is there once per window, with the window's place as a constant
            test_graphs: lambda cell: "windowed" not in cell.name,
            test_collectives_of_sequence_parallel_are_llamas: lambda cell: "sequence-parallel" in cell.name,
        }.get(metafunc.function, lambda cell: True)
        metafunc.parametrize(
            names,
            [
                pytest.param(release, cell, id=f"{release.version}-{cell.name}")
                for release in releases
                for cell in cells_of(release)
                if which(cell)
            ],
        )
    elif "twin" in wanted:
        metafunc.parametrize(
            names, [pytest.param(r, twin, id=f"{r.version}-{twin}") for r in releases for twin in TWINS]
        )
    else:
        metafunc.parametrize(names, [pytest.param(r, id=r.version) for r in releases])


class Lowered:
    """Everything of one release: lowered at once, run at once."""

    def __init__(self, release, cells, twins, checkpoints, out: Path):
        def job(cell, **more):
            return {"name": cell.name, "checkpoint": checkpoints[cell.checkpoint], "neuron": cell.neuron, **more}

        jobs = [job(cell, shards=["library", "ours"]) for cell in cells]
        jobs += [{**job(TWIN), "name": twin, "model": f"twins:{twin}", "shards": ["ours"]} for twin in twins]
        jobs += [
            {
                **job(cell),
                "name": f"llama-{cell.name}",
                "checkpoint": checkpoints["llama"],
                "model": lowering.LLAMA,
                "shards": [],
                "neuron": {**cell.neuron, "fused_qkv": False},
            }
            for cell in cells
            if "sequence-parallel" in cell.name
        ]
        self.out = out
        self.facts = lowering.lower(release, jobs, out)
        runs = [
            self._run(cell.name, cell, checkpoints[cell.checkpoint])
            for cell in cells
            if "graphs" in self.facts[cell.name] and cell.runs
        ]
        runs += [self._run(twin, TWIN, None) for twin in ("WrongSchedule", "SwappedKeysAndValues") if twin in twins]
        self.results = lowering.run(runs, out)

    def _run(self, name, cell, checkpoint):
        run = {
            "name": name,
            "folder": str(self.out / name),
            "shards": str(self.out / name / "ours"),
            "prompts": prompts_of(cell),
            "new_tokens": NEW_TOKENS,
        }
        if length := cell.options.get("speculation_length"):
            run |= {"speculation_length": length, "drafts": drafts_of(expected_tokens(cell, checkpoint))}
        if cell.dtype == "bfloat16":
            run["new_tokens"] = 8
            run["forced"] = expected_tokens(cell, checkpoint)
            run["logits"] = str(self.out / f"{name}.npy")
        return run

    def graphs(self, name: str) -> dict[str, dict]:
        facts = self.facts[name]
        assert "error" not in facts, facts["traceback"]
        return facts["graphs"]

    def tokens(self, name: str) -> list[list[int]]:
        self.graphs(name)
        result = self.results[name]
        assert "error" not in result, result["error"]
        return result["tokens"]


@pytest.fixture(scope="session")
def checkpoints(random_checkpoints, tmp_path_factory) -> dict[str, str]:
    """Folders by name; of "llama" no more than its config."""
    llama, negative = (tmp_path_factory.mktemp(name) for name in ("llama", "negative"))
    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        pad_token_id=0,
    ).save_pretrained(llama)
    make_checkpoint(negative, vocab_size=253, tie_word_embeddings=False)
    below_zero(negative / "model.safetensors")
    return {**random_checkpoints, "tiny": str(TINY), "llama": str(llama), "negative": str(negative)}


def below_zero(file: Path) -> None:
    """All logits become negative: a column of padding, which is 0, would win where it is not masked."""
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 0] = 8
    tensors["model.norm.weight"][0] = 1
    tensors["lm_head.weight"][:, 0] = -2000
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0  # the first channel stays as embedded
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def lowered(request, checkpoints, tmp_path_factory):
    """Of a release, for the cells and twins that were asked for."""
    releases = {}

    def get(release) -> Lowered:
        if release not in releases:
            params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            params = [p for p in params if p.get("release") == release]
            asked = {p["cell"].name for p in params if isinstance(p.get("cell"), Cell)}
            twins = {p["twin"] for p in params if "twin" in p}
            cells = [cell for cell in cells_of(release) if cell.name in asked]
            out = tmp_path_factory.mktemp(f"hlo-{release.version}")
            try:
                releases[release] = Lowered(release, cells, sorted(twins), checkpoints, out)
            except RuntimeError as error:
                releases[release] = error
        if isinstance(releases[release], RuntimeError):
            pytest.fail(str(releases[release]))
        return releases[release]

    return get


def schedule_of(checkpoint: str) -> list[int]:
    return json.loads(Path(checkpoint, "config.json").read_text())["no_rope_layers"]


def expected_tokens(cell, checkpoint):
    return [reference_tokens(checkpoint, tuple(prompt), NEW_TOKENS, ()) for prompt in prompts_of(cell)]


def header(file: Path) -> dict[str, list]:
    """Name -> [dtype in HLO's names, shape] of a shard file."""
    with open(file, "rb") as data:
        entries = json.loads(data.read(int.from_bytes(data.read(8), "little")))
    entries.pop("__metadata__", None)
    return {name: [SAFETENSORS.get(e["dtype"], e["dtype"]), e["shape"]] for name, e in entries.items()}


def test_graphs(release, cell, lowered, checkpoints):
    graphs = lowered(release).graphs(cell.name)
    submodels = {"context_encoding_model", "token_generation_model"}
    submodels |= {"speculation_model"} if cell.options.get("speculation_length") else set()
    assert {facts["submodel"] for facts in graphs.values()} == submodels
    schedule = schedule_of(checkpoints[cell.checkpoint])
    assert {name: faults(facts, schedule, cell.neuron) for name, facts in graphs.items()} == {
        name: {} for name in graphs
    }


def test_no_pattern_that_goes_wrong_on_a_device(release, cell, lowered):
    """Of what is publicly reported, see neuron_hlo/patterns.py; where one stands, the reason why it is harmless."""
    for name, facts in lowered(release).graphs(cell.name).items():
        assert facts["patterns"]["not_checked"] == {} and len(facts["patterns"]["checked"]) > 20
        assert [found for found in facts["patterns"]["found"] if not found["harmless"]] == [], name


def test_weights_are_those_of_the_shard_files(release, cell, lowered):
    graphs = lowered(release).graphs(cell.name)
    folder = lowered(release).out / cell.name
    files = [f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(cell.tp)]
    same, differing, lacking = cmpfiles(folder / "library", folder / "ours", files, shallow=False)
    assert (same, differing, lacking) == (files, [], [])
    read = {name: [dtype, shape] for facts in graphs.values() for name, (_, dtype, shape) in facts["weights"].items()}
    for file in files:
        stored = header(folder / "ours" / file)
        unread = stored.keys() - read.keys()
        assert {name for name in unread if not name.endswith("rank_util.rank")} == set()
        assert {name: stored.get(name) for name in read} == read


def test_tokens_equal_transformers(release, cell, lowered, checkpoints, tmp_path):
    checkpoint = checkpoints[cell.checkpoint]
    if cell.options.get("quantized"):
        checkpoint = dequantized(checkpoint, tmp_path, **cell.options)
    assert lowered(release).tokens(cell.name) == expected_tokens(cell, checkpoint)


def dequantized(checkpoint, folder, **options):
    """The checkpoint with the values that its quantized weights stand for, its head untied."""
    model = load_altered_reference(checkpoint, quantized=Settings(**options))
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return str(folder)


def test_bfloat16_is_off_by_no_more_than_transformers(release, cell, lowered, checkpoints):
    """Logits after the same tokens, against transformers' float32."""
    lowered(release).tokens(cell.name)
    got = numpy.load(lowered(release).out / f"{cell.name}.npy")
    checkpoint = checkpoints[cell.checkpoint]
    tokens = expected_tokens(cell, checkpoint)
    models = [SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    ours, theirs = [], []
    for row, prompt in enumerate(prompts_of(cell)):
        steps = got.shape[1]
        with torch.inference_mode():
            ids = torch.tensor([prompt + tokens[row][: steps - 1]])
            exact, rounded = (model(ids).logits[0, -steps:].float().numpy() for model in models)
        ours.append(got[row] - exact)
        theirs.append(rounded - exact)
    rms = [float(numpy.sqrt(numpy.square(numpy.stack(d)).mean())) for d in (ours, theirs)]
    print(f"off by {rms[0]:.4f}, transformers by {rms[1]:.4f}, of {numpy.abs(got).max():.1f}")
    assert rms[0] <= 1.25 * rms[1]


def test_collectives_of_sequence_parallel_are_llamas(release, cell, lowered):
    def collectives(name):
        return {graph: facts["collectives"] for graph, facts in lowered(release).graphs(name).items()}

    assert collectives(cell.name) == collectives(f"llama-{cell.name}")


def test_broken_twin_is_caught(release, twin, lowered, checkpoints):
    """By the check that is there for it, in both submodels, and by no other."""
    schedule = schedule_of(checkpoints["plain"])
    for facts in lowered(release).graphs(twin).values():
        assert set(faults(facts, schedule, TWIN.neuron)) == TWINS[twin]
    if twin in ("WrongSchedule", "SwappedKeysAndValues"):
        expected = expected_tokens(TWIN, checkpoints["plain"])
        assert all(got != wanted for got, wanted in zip(lowered(release).tokens(twin), expected, strict=True))


def test_the_3b_config_lowers_and_agrees_with_plan(release, tmp_path):
    """Operations and bytes per step within 2% of smollm3_neuron.machine.roofline, without any weights."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM3_3B))
    job = {"name": "3b", "checkpoint": str(tmp_path), "neuron": NEURON_3B}
    facts = lowering.lower(release, [job], tmp_path)["3b"]
    assert "error" not in facts, facts["traceback"]
    config = read_config(tmp_path)
    of = Estimate(config, NEURON_3B["tp_degree"], NEURON_3B["seq_len"])
    prefill, decode = facts["graphs"]["context_encoding_model_0"], facts["graphs"]["token_generation_model_0"]
    for found in (prefill, decode):
        assert faults(found, config.no_rope_layers, NEURON_3B) == {}
        assert [pattern for pattern in found["patterns"]["found"] if not pattern["harmless"]] == []
    assert decode["flops"] == pytest.approx(of.decode_flops, rel=0.02)
    assert prefill["flops"] == pytest.approx(of.prefill_flops, rel=0.02)
    assert decode["bytes_read"] == pytest.approx(of.decode_bytes, rel=0.02)


def test_command_writes_the_graphs_and_a_report(release, tmp_path):
    out = tmp_path / "out"
    command = [
        sys.executable,
        lowering.ROOT / "scripts/compile.py",
        "--model",
        "tiny",
        "--tp",
        "4",
        "--seq-len",
        "128",
        "--device",
        "hlo",
        "--nxd-source",
        f"{release.nxd}:{release.nxdi}",
        "--output",
        out,
    ]
    for _ in range(2):  # the second takes the place of the first
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("Nothing was compiled")
        assert not any(word in done.stdout for word in ("FAULT", "PATTERN", "NOT CHECKED"))
        assert done.stdout.count("that are reported to go wrong are not in it") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [
        "context_encoding_model_0.hlo",
        "report.json",
        "report.txt",
        "token_generation_model_0.hlo",
    ]
    report = json.loads((out / "report.json").read_text())
    for found in report["graphs"].values():
        assert found["keys_rotated"] == schedule_of(TINY)
        assert found["flops"] == pytest.approx(found["planned_flops"], rel=0.02)
        assert found["bytes_read"] == pytest.approx(found["planned_bytes"], rel=0.02)


def test_command_names_what_the_library_refuses(release, tmp_path):
    command = [
        sys.executable,
        lowering.ROOT / "scripts/compile.py",
        "--model",
        "tiny",
        "--seq-len",
        "4097",
        "--device",
        "hlo",
        "--nxd-source",
        f"{release.nxd}:{release.nxdi}",
        "--output",
        tmp_path / "out",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith("error: seq_len is 4097"), done.stderr
    assert list(tmp_path.iterdir()) == []
