"""Each feature, token for token against transformers: on nxd_cpu, and on the real library's sources with --nxd-source.

A feature that a place cannot take says so in `only`; docs/evidence.md has the reasons.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from reference import reference_tokens
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from nxd_sources import model_jobs
from nxd_sources.release import run_real

CPU = "nxd_cpu"
PARTS, AHEAD = "nxd_cpu-in-parts", "nxd_cpu-compiled-ahead"  # at TP 1; the second one takes minutes for each
IN_PARTS = (
    "continuous-batching-ctx2",
    "buckets-batch",
    "window-listed-tp1",
    "on-device-sampling-tp1",
    "vocab-parallel-odd-vocabulary-tp1",
    "rope-float64-tp1",
    "speculation-2-tp1",
)


def prompt(length, start=0):
    """Token ids, other ones for another start."""
    return [(7 + 31 * (i + start) + i * i) % 255 + 1 for i in range(length)]


@dataclass(frozen=True, eq=False)
class Feature:
    name: str
    neuron: dict
    prompts: list
    checkpoint: str = "plain"
    new_tokens: int = 24
    serve: dict = field(default_factory=dict)  # when the requests come and go, see model_jobs.serve
    sampling_params: list = field(default_factory=list)
    only: tuple = ()  # nothing: every place
    answer: bool = False  # by this project's generate()
    drafts: bool = False  # with candidates that are right but for some, other ones in each row
    cached: tuple = ()  # prefix caching: how many tokens of each prompt the cache has already

    def job(self, checkpoints):
        neuron = {"tp_degree": 1, "batch_size": 2, "seq_len": 128, **self.neuron}
        kind = "serve" if self.serve else "share" if self.cached else "answer" if self.answer else "generate"
        more = {"sampling_params": self.sampling_params} if self.sampling_params else {}
        if self.drafts:
            more["drafts"] = drafts_of(self.expected(checkpoints))
        return {
            "name": self.name,
            "kind": kind,
            "checkpoint": checkpoints[self.checkpoint],
            "neuron": neuron,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            **self.serve,
            **more,
        }

    def expected(self, checkpoints):
        stays = self.serve.get("stays", [self.new_tokens] * len(self.prompts))
        checkpoint = checkpoints[self.checkpoint]
        return [reference_tokens(checkpoint, tuple(p), count, ()) for p, count in zip(self.prompts, stays)]


def drafts_of(expected):
    """What could be looked up in the place of each answer: right but for some tokens, other ones in each row."""
    return [
        [token if at % (3 + row) else (token + 1) % 256 for at, token in enumerate(tokens)]
        for row, tokens in enumerate(expected)
    ]


# line 2 is first a long prompt's and then a short one's, line 0 is left free for a while; from one to three are there
COME_AND_GO = dict(comes=[0, 0, 2, 7, 13], stays=[12, 6, 14, 10, 5], lines=[1, 2, 0, 2, 1])
# three of them are left out of some steps; the first row of those steps is at an earlier position
REST = {**COME_AND_GO, "rests": [[5], [2], [3, 4, 9], [8, 10], []]}
REQUESTS = [prompt(9), prompt(40, 1), prompt(3, 2), prompt(5, 3), prompt(1, 4)]
CONTINUOUS = dict(is_continuous_batching=True, batch_size=3)
BUCKETS = dict(
    enable_bucketing=True,
    context_encoding_buckets=[8, 16, 64],
    token_generation_buckets=[16, 32, 128],
    max_context_length=64,
)
EDGES = [prompt(length, length) for length in (1, 7, 8, 9, 15, 16, 17, 63, 64)]

SHORT_AND_LONG = [prompt(9), prompt(40, 1)]  # around a window of 16
SOURCES = ("0.8.0", "0.9.0")
SEQUENCE_PARALLEL = dict(sequence_parallel_enabled=True, **CONTINUOUS, ctx_batch_size=1)
WINDOWED = dict(windowed_context_encoding_size=16, max_context_length=64)
# the last is in the cache whole: its last block is encoded again
SHARING = [prompt(200), prompt(170) + prompt(9, 1), prompt(100) + prompt(120, 2), prompt(192)]
CACHED = (0, 160, 96, 160)
PREFIX_CACHING = dict(
    is_prefix_caching=True,
    is_block_kv_layout=True,
    is_continuous_batching=True,
    batch_size=4,
    ctx_batch_size=1,
    seq_len=256,
    pa_block_size=32,
    pa_num_blocks=33,
)

FEATURES = [
    *(
        Feature(
            f"continuous-batching-tp{tp}",
            {**CONTINUOUS, "tp_degree": tp, "ctx_batch_size": 1},
            REQUESTS,
            serve=COME_AND_GO,
        )
        for tp in (1, 2)
    ),
    *(
        Feature(
            f"left-out-lines-kept-tp{tp}",
            {**CONTINUOUS, "tp_degree": tp, "ctx_batch_size": 1, "apply_seq_ids_mask": True},
            REQUESTS,
            serve=REST,
        )
        for tp in (1, 2)
    ),
    Feature("continuous-batching-ctx2", {**CONTINUOUS, "ctx_batch_size": 2}, REQUESTS, serve=COME_AND_GO, only=(CPU,)),
    *(Feature(f"buckets-tp{tp}", {**BUCKETS, "tp_degree": tp, "batch_size": 1}, EDGES) for tp in (1, 2)),
    Feature("buckets-batch", {**BUCKETS, "batch_size": 2}, EDGES[1:]),
    Feature(
        "buckets-automatic",
        {"enable_bucketing": True, "seq_len": 256, "batch_size": 1},
        [prompt(127), prompt(128), prompt(129)],
        new_tokens=4,
    ),
    Feature(
        "continuous-batching-buckets",
        {**BUCKETS, **CONTINUOUS, "tp_degree": 2, "ctx_batch_size": 1},
        REQUESTS,
        serve=COME_AND_GO,
    ),
    *(
        Feature(f"{name}-tp{tp}", {"tp_degree": tp, "fused_qkv": tp == 2}, SHORT_AND_LONG, name, new_tokens=40)
        for name in ("window", "window-listed", "window-everywhere")
        for tp in (1, 2)
    ),
    Feature(
        "window-continuous-batching", {**CONTINUOUS, "ctx_batch_size": 1}, REQUESTS, "window-listed", serve=COME_AND_GO
    ),
    *(
        Feature(
            f"on-device-{name}-tp{tp}",
            {"tp_degree": tp, "on_device_sampling_config": config},
            SHORT_AND_LONG,
            checkpoint,
            # each of these leaves the best token only, in its own way
            sampling_params=[[1.0, 1.0, 1.0], [64.0, 1e-4, 0.7]],
            only=() if tp == 1 else (CPU,),
        )
        for name, config in (
            ("greedy", {"top_k": 1}),
            ("sampling", {"do_sample": True, "dynamic": True, "global_topk": 64}),
        )
        for tp, checkpoint in ((1, "plain"), (2, "odd-vocabulary"), (3, "plain"))
    ),
    *(
        Feature(f"{name}-tp{tp}", {"tp_degree": tp}, SHORT_AND_LONG, name)
        for name in ("gelu", "gelu_pytorch_tanh", "relu")
        for tp in (1, 2)
    ),
    *(
        Feature(f"{name}-tp{tp}", {"tp_degree": tp}, SHORT_AND_LONG, name)
        for name in ("odd-intermediate", "odd-intermediate-biases")
        for tp in (2, 4)
    ),
    Feature("all-rope", {"tp_degree": 2, "fused_qkv": True}, SHORT_AND_LONG, "all-rope"),
    *(
        Feature(f"vocab-parallel-{name}-tp{tp}", {"tp_degree": tp, "vocab_parallel": True}, SHORT_AND_LONG, name)
        for name in ("plain", "odd-vocabulary")
        for tp in (1, 2, 4)
    ),
    *(
        Feature(
            f"sequence-parallel-{name}-tp{tp}",
            {**SEQUENCE_PARALLEL, "tp_degree": tp, **more},
            REQUESTS,
            serve=COME_AND_GO,
            only=SOURCES,
        )
        for name, more in (
            ("continuous-batching", {}),
            ("vocab-parallel-fused", {"vocab_parallel": True, "fused_qkv": True}),
        )
        for tp in (2, 4)
    ),
    *(
        Feature(
            f"rope-float64-{name}tp{tp}", {"tp_degree": tp, "rope_precision": "float64"}, SHORT_AND_LONG, checkpoint
        )
        for name, checkpoint in (("", "plain"), ("yarn-", "yarn"))
        for tp in (1, 2)
    ),
    Feature(
        "context-shorter-than-the-cache", {"max_context_length": 40, "tp_degree": 2}, SHORT_AND_LONG, new_tokens=80
    ),
    *(
        Feature(
            f"windowed-context-tp{tp}", {**WINDOWED, "tp_degree": tp}, EDGES + [prompt(33), prompt(48)], only=SOURCES
        )
        for tp in (1, 2)
    ),
    Feature(
        "windowed-context-buckets", {**BUCKETS, **WINDOWED, "context_encoding_buckets": [16, 64]}, EDGES, only=SOURCES
    ),
    Feature(
        "sequence-parallel-prefix-caching-tp2",
        {**PREFIX_CACHING, "tp_degree": 2, "sequence_parallel_enabled": True},
        SHARING,
        "long",
        only=SOURCES,
        cached=CACHED,
    ),
    *(
        Feature(
            f"prefix-caching-{name}-tp{tp}",
            {**PREFIX_CACHING, "tp_degree": tp, **more},
            SHARING,
            "long",
            only=SOURCES,
            cached=CACHED,
        )
        for name, more in (
            ("one-bucket", {}),
            ("buckets", dict(enable_bucketing=True, context_encoding_buckets=[128, 256], prefix_buckets=[128, 256])),
        )
        for tp in (1, 2)
    ),
    # what generate() makes of each kind of artifact; the last group has one prompt
    *(
        Feature(f"answer-{name}-tp{tp}", {"tp_degree": tp, **neuron}, prompts, checkpoint, only=places, answer=True)
        for name, neuron, prompts, checkpoint, places in (
            ("plain", {"batch_size": 2}, REQUESTS, "plain", (CPU, *SOURCES)),
            ("continuous-batching", {**CONTINUOUS, "ctx_batch_size": 1}, REQUESTS[1:], "plain", (CPU, *SOURCES)),
            ("windowed-context", WINDOWED, REQUESTS, "plain", SOURCES),
            ("prefix-caching", PREFIX_CACHING, [*SHARING, prompt(1, 4)], "long", SOURCES),
        )
        for tp in (1, 2)
    ),
    # several tokens verified in one step; rows accept different counts, and a prompt or its bucket is as long as a step
    *(
        Feature(
            f"speculation-{length}-tp{tp}",
            {"tp_degree": tp, "batch_size": 3, "speculation_length": length, **neuron},
            prompts,
            only=(CPU,),
            answer=True,
            drafts=True,
        )
        for length, tp, neuron, prompts in (
            (2, 1, {}, REQUESTS[:3]),
            (5, 3, {"fused_qkv": True}, REQUESTS[:3]),
            (7, 2, {**CONTINUOUS, "ctx_batch_size": 1}, REQUESTS[:4]),
            (8, 1, {**BUCKETS, "token_generation_buckets": [32, 128]}, REQUESTS[2:]),
            (9, 2, {"max_context_length": 40, "on_device_sampling_config": {"top_k": 1}}, REQUESTS[:2]),
        )
    ),
    # from 4,096 tokens on the library would take its attention kernel
    Feature(
        "4096-tokens-tp2",
        {"tp_degree": 2, "batch_size": 1, "seq_len": 4096},
        [prompt(4000)],
        "8192-positions",
        new_tokens=4,
    ),
    Feature(
        "prefix-caching-4096-tokens-tp2",
        {**PREFIX_CACHING, "tp_degree": 2, "batch_size": 2, "seq_len": 4096, "pa_num_blocks": 257},
        [prompt(4000), prompt(3000) + prompt(900, 1)],
        "8192-positions",
        new_tokens=4,
        only=SOURCES,
        cached=(0, 2976),
    ),
    Feature("window-as-long-as-the-cache", {"seq_len": 16, "batch_size": 1}, [prompt(9)], "window", new_tokens=8),
]


def pytest_generate_tests(metafunc):
    if "feature" not in metafunc.fixturenames:
        return
    on_cpu = [feature for feature in FEATURES if not feature.only or CPU in feature.only]
    cells = [(CPU, feature, ()) for feature in on_cpu]
    cells += [(PARTS, feature, ()) for feature in on_cpu if feature.name in IN_PARTS]
    cells += [(AHEAD, feature, pytest.mark.slow) for feature in on_cpu if feature.neuron.get("tp_degree", 1) == 1]
    for release in metafunc.config.nxd_releases:
        cells += [(release, feature, ()) for feature in FEATURES if not feature.only or release.version in feature.only]
    metafunc.parametrize(
        "place, feature",
        [
            pytest.param(place, feature, id=f"{getattr(place, 'version', place)}-{feature.name}", marks=marks)
            for place, feature, marks in cells
        ],
    )


class Uncompiled:
    """A part of a graph that torch interprets, called as a compiled one."""

    def __init__(self, part):
        from nxd_cpu_compiler.build import write_products

        write_products(part.graph_module)
        self.run = lambda inputs: part.graph_module(*inputs)


def on_nxd_cpu(job, folder, place=CPU):
    from smollm3_neuron.machine.runtime import ensure_neuronx

    if ensure_neuronx() != "cpu":
        pytest.skip("the Neuron SDK is installed here: nxd_cpu is not used")
    from nxd_cpu_compiler.build import compile_ahead, plan
    from nxd_cpu_compiler.run import CompiledGraph, load
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    def compile_and_load(model):
        artifact = folder / "artifact"
        model.compile(artifact)
        if place == AHEAD:
            compile_ahead(model.graphs, artifact)
            model.graphs = load(artifact)
            return model.load_weights(artifact)
        model.load(artifact)
        if place == PARTS:
            kinds, constants = {}, {}
            plans = [plan(graph, kinds, constants) for graph in model.graphs]
            parts = {file: Uncompiled(part) for file, part in kinds.items()}
            model.graphs = [CompiledGraph(plan, parts, constants) for plan in plans]
            model.load_weights(artifact)

    return getattr(model_jobs, job["kind"])(NeuronSmolLM3ForCausalLM, job, 0, folder, compile_and_load)


@pytest.fixture(scope="session")
def on_sources(request, random_checkpoints, tmp_path_factory):
    """Results of (release, feature): one process per release for all the features that were asked for."""
    results = {}

    def get(release, feature):
        if release not in results:
            params = [
                item.callspec.params for item in request.session.items if "feature" in getattr(item, "fixturenames", ())
            ]
            features = dict.fromkeys(p["feature"] for p in params if p["place"] == release)
            jobs = [feature.job(random_checkpoints) for feature in features]
            results[release] = run_real(release, jobs, tmp_path_factory.mktemp(release.version))
        return results[release][feature.name]

    return get


def test_tokens_equal_transformers(place, feature, on_sources, random_checkpoints, tmp_path):
    if place in (CPU, PARTS, AHEAD):
        result = on_nxd_cpu(feature.job(random_checkpoints), tmp_path, place)
    else:
        result = on_sources(place, feature)
    assert "error" not in result, result["error"]
    assert result["tokens"] == feature.expected(random_checkpoints)
    assert tuple(result.get("cached", ())) == feature.cached
    if feature.drafts:
        accepted, offered = zip(*result["accepted"])
        assert all(accepted) and sum(accepted) < sum(offered)


def test_all_rope_is_a_llama(random_checkpoints):
    """A Llama with the weights of "all-rope" has its tokens: so those of the feature above are a Llama's."""
    from smollm3_neuron.model.config import REQUIRED, read_config

    folder = random_checkpoints["all-rope"]
    config = read_config(folder)
    names = (*REQUIRED, "rope_theta", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings")
    llama = LlamaForCausalLM(LlamaConfig(**{name: getattr(config, name) for name in names})).eval()
    missing = llama.load_state_dict(load_file(f"{folder}/model.safetensors"), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    llama.tie_weights()
    tokens = llama.generate(
        torch.tensor([SHORT_AND_LONG[1]]), do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0
    )
    assert tokens[0, 40:].tolist() == reference_tokens(folder, tuple(SHORT_AND_LONG[1]), 24, ())


def test_random_checkpoints_leave_tying_out(random_checkpoints):
    """transformers does not write the default, so they are what a config without the key is."""
    assert "tie_word_embeddings" not in json.loads(Path(random_checkpoints["plain"], "config.json").read_text())
