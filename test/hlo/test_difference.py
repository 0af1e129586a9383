"""The model's graphs beside those of NxD Inference's own Llama, a model that is known to compile and run on a device.

Of the same shape and with every layer rotary they are Llama's, operation for operation, and what the model's documented
workarounds add; a NoPE layer only lacks its rotation. That is the nearest thing to "neuronx-cc takes it" without
neuronx-cc, and no more.

Needs --nxd-source and `make hlo-venv`; asked for with -m hlo.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import lowering
import pytest
from lowering import BUCKETS, CONTINUOUS, GREEDY, PREFIX_CACHING, SEQUENCE_PARALLEL, Cell
from places import CONTRIB
from transformers import LlamaConfig

pytestmark = pytest.mark.hlo
LENGTH = 256
HEAD_DIM = 16
OPTIONS = {
    "sequence-parallel": SEQUENCE_PARALLEL,
    "sampling": GREEDY,
    "continuous": CONTINUOUS,
    "buckets": BUCKETS,
    "vllm": {**GREEDY, **CONTINUOUS, **BUCKETS},
    "vocab-parallel": {"vocab_parallel": True},
    "async": {"async_mode": True, **GREEDY},
    "short-context": {"max_context_length": 40},
    "int8": {"quantized": True},
    "windowed-context": {"windowed_context_encoding_size": 16},
    "prefix-caching": PREFIX_CACHING,
}
CELLS = [
    *[Cell("all-rope", tp, fused, batch=1, dtype="bfloat16") for tp in (1, 2, 8) for fused in (False, True)],
    *[
        Cell("all-rope", 2, label=label, dtype="bfloat16", seq_len=LENGTH, options=options)
        for label, options in OPTIONS.items()
    ],
]
# the library's padding of position_ids is put right with attention_mask, see NeuronSmolLM3Model.forward
POSITIONS = {"parameter", "multiply"}
ADDED = {
    "context_encoding_model": POSITIONS,
    "windowed-context": POSITIONS | {"slice", "concatenate"},
    # padding is masked after the cached prefix, too
    "prefix-caching": {"parameter", "broadcast", "reshape", "select", "convert"},
}
ROTATION = {"slice", "negate", "concatenate", "multiply", "add", "convert", "broadcast", "reshape", "constant"}


def pytest_generate_tests(metafunc):
    releases = metafunc.config.nxd_releases
    reason = lowering.missing() or (None if releases else "needs --nxd-source NXD_SRC:NXDI_SRC")
    names = ["release", "cell"] if "cell" in metafunc.fixturenames else ["release"]
    if reason:
        skipped = pytest.param(*[None] * len(names), marks=pytest.mark.skip(reason=reason), id="real-library")
        metafunc.parametrize(names, [skipped])
    elif "cell" in names:
        pairs = [(release, cell) for release in releases for cell in CELLS]
        metafunc.parametrize(names, [pytest.param(*pair, id=f"{pair[0].version}-{pair[1].name}") for pair in pairs])
    else:
        metafunc.parametrize(names, [pytest.param(release, id=release.version) for release in releases])


@pytest.fixture(scope="session")
def differences(random_checkpoints, tmp_path_factory):
    """Of a release: {"llama", "nope" or "twin": {cell: {graph: difference}}}, see neuron_hlo/difference.py."""
    llama = tmp_path_factory.mktemp("llama")
    config = json.loads(Path(random_checkpoints["all-rope"], "config.json").read_text())
    shared = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "pad_token_id",
    )  # fmt: skip
    LlamaConfig(**{name: config[name] for name in shared}, tie_word_embeddings=True).save_pretrained(llama)
    releases = {}

    def get(release):
        if release not in releases:
            out = tmp_path_factory.mktemp(f"difference-{release.version}")
            releases[release] = compare(release, {**random_checkpoints, "llama": str(llama)}, out)
        return releases[release]

    return get


def compare(release, checkpoints, out):
    kinds = {"all-rope": {}, "llama": {"model": lowering.LLAMA}, "plain": {}, "twin": {"model": "twins:DroppedCosSin"}}
    jobs = []
    for cell in CELLS:
        for kind, more in kinds.items():
            if kind != "twin" or cell is CELLS[0]:
                checkpoint = checkpoints.get(kind, checkpoints["all-rope"])
                jobs.append({"name": f"{kind}/{cell.name}", "checkpoint": checkpoint, "neuron": cell.neuron, **more})
    facts = lowering.lower(release, jobs, out)
    failed = {name: found["traceback"] for name, found in facts.items() if "error" in found}
    assert failed == {}
    pairs = {"llama": ("all-rope", "llama"), "nope": ("plain", "all-rope"), "twin": ("twin", "llama")}
    found = {kind: {} for kind in pairs}
    for kind, (one, other) in pairs.items():
        for cell in CELLS if kind != "twin" else CELLS[:1]:
            graphs = facts[f"{one}/{cell.name}"]["graphs"]
            assert facts[f"{other}/{cell.name}"]["graphs"].keys() == graphs.keys()
            files = [str(out / side / cell.name / f"{graph}.hlo") for graph in graphs for side in (one, other)]
            of_files = differences_of(files)
            found[kind][cell.name] = {graph: of_files[file] for graph, file in zip(graphs, files[::2], strict=True)}
    return found


def differences_of(files: list[str]) -> dict[str, dict]:
    command = [lowering.VENV / "bin/python", "-m", "neuron_hlo.difference", *files]
    environment = {**os.environ, "PYTHONPATH": str(CONTRIB)}
    return json.loads(subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout)


def opcodes(operations) -> set[str]:
    return {operation.split()[0] for operation in operations}


def test_nothing_but_the_workarounds_is_not_llamas(release, cell, differences):
    for graph, found in differences(release)["llama"][cell.name].items():
        assert found["missing"] == {}, graph
        submodel = graph.rpartition("_")[0]
        allowed = ADDED.get(cell.label, ADDED.get(submodel, set())) if submodel == "context_encoding_model" else set()
        assert opcodes(found["added"]) <= allowed, (graph, found["added"])
        if not cell.options.get("windowed_context_encoding_size") and not cell.options.get("is_prefix_caching"):
            assert sorted(found["added"].values()) == [1] * len(allowed), (graph, found["added"])


def test_a_nope_layer_lacks_its_rotation_and_nothing_else(release, cell, differences):
    for graph, found in differences(release)["nope"][cell.name].items():
        assert found["added"] == {}, graph
        assert opcodes(found["missing"]) == ROTATION, (graph, found["missing"])
        negated = sum(count for operation, count in found["missing"].items() if operation.startswith("negate "))
        windows = LENGTH // cell.options.get("windowed_context_encoding_size", LENGTH)
        assert negated == 2 * (windows if graph.startswith("context") else 1)  # the queries and the keys of one layer
        for operation in found["missing"]:
            of_heads = re.search(rf" \w+\[(|.*, )({HEAD_DIM}|{HEAD_DIM // 2})?\] \(", operation)
            assert of_heads, operation


def test_a_broken_model_differs(release, differences):
    """It computes cosines and sines anew in every layer."""
    for found in differences(release)["twin"][CELLS[0].name].values():
        assert {"cosine", "sine"} <= opcodes(found["added"])
