"""What the emulated device refuses, fails at and counts: broken twins, faults of the machine, foreign artifacts."""

import pytest
import running
import torch
from cells import BUCKETS, COME_AND_GO, CONTINUOUS_1, GREEDY, REQUESTS, TWO, Cell, tiny
from places import TINY
from reference import reference_tokens
from safetensors.torch import load_file
from test_features import PREFIX_CACHING, WINDOWED, prompt
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

pytestmark = pytest.mark.emulator

GREEDY_TINY = tiny("greedy", GREEDY)
# random weights: `tiny` does not feel a single cache
PLAIN = Cell("plain", {"tp_degree": 2, "batch_size": 1, **GREEDY}, TWO)
ASYNC = Cell("async", {**PLAIN.neuron, "async_mode": True}, TWO)
CONTINUOUS = Cell("continuous", CONTINUOUS_1, REQUESTS, serve=COME_AND_GO)
MASKED = Cell("masked", {**CONTINUOUS_1, "apply_seq_ids_mask": True}, REQUESTS, serve=COME_AND_GO)
TWO_BUCKETS = Cell("buckets", {"tp_degree": 2, "batch_size": 1, **BUCKETS}, [prompt(120), prompt(128, 1)])

LEFT_OUT = [prompt(9), prompt(60, 1), prompt(30, 2)]
PROJECT = {"kind": "project_generate"}

# artifacts on which `generate` has more to hand over than on others
GENERATE = {
    "prefix-caching": Cell("prefix-caching", {**PREFIX_CACHING, "tp_degree": 2}, [prompt(40), prompt(200, 1)], "long"),
    "windows": Cell("windows", {**WINDOWED, "tp_degree": 2}, TWO),
    "async": Cell("async", ASYNC.neuron, TWO),
}
# twin -> the cell that it breaks, and the message that names it; None: the tokens are others
TWINS = {
    "rows_in_the_callers_order": (CONTINUOUS, None),
    "a_cache_is_not_written_back": (PLAIN, None),
    "the_bucket_is_one_too_small": (TWO_BUCKETS, "Attention mask supplied (length=129) is longer than max_length"),
    "an_output_is_read_before_its_execution_ended": (ASYNC, None),
    "a_rank_has_anothers_shard": (PLAIN, None),
    "keys_and_values_are_swapped_on_a_rank": (PLAIN, None),
    "a_tensor_is_missing": (PLAIN, "layers.3.mlp.up_proj.weight is not among the weights of rank 1"),
    "a_tensor_has_another_dtype": (PLAIN, "norm.weight of rank 1 is torch.bfloat16, the graph was compiled for"),
    "a_tensor_has_another_shape": (PLAIN, "lm_head.weight of rank 1 has shape"),
    "tokens_stay_int64": (PLAIN, "input 0 is torch.int64, the graph was compiled for torch.int32"),
}
# what is injected -> what is said of it, of a device that loads and generates
FAULTS = {
    "fail": ({"NEURON_EMULATOR_FAULTS": "fail=12"}, "execution 12 failed"),
    "die": ({"NEURON_EMULATOR_FAULTS": "die=1@12"}, "NeuronCore 1 does not answer"),
    "memory": ({"NEURON_EMULATOR_CORE_GB": "0.001"}, "out of device memory on NeuronCore 0"),
}


def release_of(nxd_releases):
    reason = running.missing() or (None if nxd_releases else "needs --nxd-source NXD_SRC:NXDI_SRC")
    if reason:
        pytest.skip(reason)
    return nxd_releases[0]


@pytest.fixture(scope="module")
def checkpoints(random_checkpoints):
    return {**random_checkpoints, "tiny": str(TINY)}


@pytest.fixture(scope="module")
def run(checkpoints, tmp_path_factory):
    """Results of jobs, each a name, a cell and more keys, from one call of emulated.py; "out" is their folder."""

    def results(release, jobs):
        out = tmp_path_factory.mktemp(f"device-{release.version}")
        jobs = [{**cell.job(checkpoints), "name": name, **more} for name, cell, more in jobs]
        return {**running.run(release, jobs, out), "out": out}

    return results


@pytest.fixture(scope="module")
def expected(checkpoints):
    return lambda cell: cell.expected(checkpoints)


@pytest.fixture(scope="module")
def results(nxd_releases, run):
    """Of all jobs that need nothing of one another."""
    jobs = [(twin, cell, {"twin": twin}) for twin, (cell, _) in TWINS.items()]
    jobs += [(f"fault-{name}", GREEDY_TINY, {"environment": variables}) for name, (variables, _) in FAULTS.items()]
    jobs += [
        ("fault-fail-async", ASYNC, {"environment": {"NEURON_EMULATOR_FAULTS": "fail=12"}}),
        ("nan", tiny("nan", {}), {**PROJECT, "groups": [1], "environment": {"NEURON_EMULATOR_FAULTS": "nan=8"}}),
        ("groups", CONTINUOUS, {**PROJECT, "groups": [1, 2, 3, 4]}),
        *[(f"generate-{name}", cell, {**PROJECT, "groups": [1, 2]}) for name, cell in GENERATE.items()],
        ("left-out", CONTINUOUS, {"kind": "left_out", "prompts": LEFT_OUT}),
        ("left-out-masked", MASKED, {"kind": "left_out", "prompts": LEFT_OUT}),
        ("memory", GREEDY_TINY, {"kind": "memory"}),
    ]
    return run(release_of(nxd_releases), jobs)


def test_what_is_broken_on_purpose_is_noticed(results, expected):
    for twin, (cell, message) in TWINS.items():
        result = results[twin]
        if message:
            assert message in result.get("error", ""), (twin, result)
        else:
            assert "error" not in result, (twin, result)
            assert result["tokens"] != expected(cell), twin


def test_a_fault_of_the_machine_is_one_line_and_nothing_hangs(results):
    for name, (_, message) in FAULTS.items():
        last = results[f"fault-{name}"]["error"].strip().splitlines()[-1]
        assert message in last, (name, results[f"fault-{name}"])


def test_an_asynchronous_executions_error_comes_with_its_output(results):
    assert "execution 12 failed" in results["fault-fail-async"]["error"]


def test_a_cache_that_is_not_a_number_is_told(results):
    assert "NotANumber: the model returned logits that are not numbers" in results["nan"]["error"]


def test_generate_takes_any_number_of_prompts_with_continuous_batching(results, checkpoints):
    """One prompt, or a last group of one, is fewer rows than the library's default sampling parameters have."""
    result = results["groups"]
    assert "error" not in result, result["traceback"]
    wanted = [reference_tokens(checkpoints["plain"], tuple(row), 24, ()) for row in REQUESTS]
    assert result["tokens"] == [wanted[:1], wanted[:2], wanted[:3], wanted[:4]]


def test_generate_answers_on_artifacts_of_every_kind(results, checkpoints):
    for name, cell in GENERATE.items():
        result = results[f"generate-{name}"]
        assert "error" not in result, (name, result["traceback"])
        wanted = [reference_tokens(checkpoints[cell.checkpoint], tuple(row), 24, ()) for row in cell.prompts]
        assert result["tokens"] == [wanted[:1], wanted], name


def test_a_line_that_is_left_out_is_overwritten_by_the_first_row(results):
    """The library fills the batch up with the first row, whose K and V go to the lines that no row names."""
    result = results["left-out"]
    assert "error" not in result, result["traceback"]
    lines = [[line, result["position"]] for line in range(3)]
    assert result["changed"] == [lines, lines]


def test_a_line_that_is_left_out_keeps_its_cache_with_apply_seq_ids_mask(results):
    """What would go there goes behind the line's 128 positions, where no step looks."""
    result = results["left-out-masked"]
    assert "error" not in result, result["traceback"]
    lines = [[0, result["position"]], [1, 128], [2, 128]]
    assert result["changed"] == [lines, lines]


def test_memory_is_weights_caches_and_inputs(results):
    """Of a core, in bytes: what its shard file holds, K and V of every layer, and what a call hands over."""
    result = results["memory"]
    assert "error" not in result, result["traceback"]
    artifact = results["out"] / "memory" / "artifact"
    for rank, found in enumerate(result["bytes"]):
        weights = sum(
            t.nbytes for t in load_file(artifact / f"weights/tp{rank}_sharded_checkpoint.safetensors").values()
        )
        caches = 8 * 2 * 2 * 128 * 16 * 4  # layers, K and V, heads, positions, head_dim, bytes
        assert weights + caches <= found <= weights + caches + 20_000


@pytest.fixture(scope="module")
def again(nxd_releases, random_checkpoints, results, run):
    """Of an artifact that was compiled and loaded before."""
    artifact = str(results["out"] / "memory" / "artifact")
    jobs = [("again", GREEDY_TINY, {"artifact": artifact})]
    return run(release_of(nxd_releases), jobs)


def test_a_second_load_compiles_nothing(again):
    assert "error" not in again["again"], again["again"]["traceback"]
    print(again["again"]["seconds"])
    assert again["again"]["compiled"] == 0


def test_a_graph_of_another_release_is_refused(nxd_releases, results, run):
    if len(nxd_releases) < 2:
        pytest.skip("needs two --nxd-source")
    artifact = str(results["out"] / "memory" / "artifact")
    result = run(nxd_releases[1], [("other-release", GREEDY_TINY, {"artifact": artifact})])["other-release"]
    assert "the graph in model.pt was compiled with NxD Inference" in result["error"]


MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, "llama.modeling_llama:NeuronLlamaForCausalLM"),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, "qwen3.modeling_qwen3:NeuronQwen3ForCausalLM"),
}


def test_models_of_the_library_itself(nxd_releases, run, tmp_path):
    """Random weights, TP 2, against transformers."""
    release, wanted, jobs = release_of(nxd_releases), {}, []
    for name, (config_cls, model_cls, neuron_cls) in MODELS.items():
        torch.manual_seed(0)
        config = config_cls(
            vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=4, head_dim=16, max_position_embeddings=256, pad_token_id=0, eos_token_id=None,
            bos_token_id=None, tie_word_embeddings=False,
        )  # fmt: skip
        model = model_cls(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
        model.save_pretrained(tmp_path / name)
        wanted[name] = [
            model.generate(
                torch.tensor([row]), attention_mask=torch.ones(1, len(row), dtype=torch.long), do_sample=False,
                max_new_tokens=24, min_new_tokens=24,
            )[0, len(row) :].tolist()
            for row in TWO
        ]  # fmt: skip
        cell = Cell(name, {"tp_degree": 2}, TWO, "plain")
        more = {"checkpoint": str(tmp_path / name), "model": f"neuronx_distributed_inference.models.{neuron_cls}"}
        jobs.append((name, cell, more))
    results = run(release, jobs)
    for name in MODELS:
        assert "error" not in results[name], results[name]["traceback"]
        assert results[name]["tokens"] == wanted[name], name
