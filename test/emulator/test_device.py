"""What the emulated device refuses, fails at and counts: broken twins, faults of the machine, artifacts that are not its own."""

import shutil
from pathlib import Path

import pytest
import running
from cells import BUCKETS, COME_AND_GO, CONTINUOUS_1, GREEDY, REQUESTS, TWO, Cell, tiny
from reference import reference_tokens
from test_features import prompt

pytestmark = pytest.mark.emulator

GREEDY_TINY = tiny("greedy", GREEDY)
ASYNC = tiny("async", {**GREEDY, "async_mode": True})
CONTINUOUS = Cell("continuous", CONTINUOUS_1, REQUESTS, serve=COME_AND_GO)
TWO_BUCKETS = Cell("buckets", {"tp_degree": 2, "batch_size": 1, **BUCKETS}, [prompt(120), prompt(128, 1)])

# twin -> the cell that it breaks, and the message that names it; None: the tokens are others
TWINS = {
    "rows_in_the_callers_order": (CONTINUOUS, None),
    "a_cache_is_not_written_back": (GREEDY_TINY, None),
    "the_bucket_is_one_too_small": (TWO_BUCKETS, None),
    "an_output_is_read_before_its_execution_ended": (ASYNC, None),
    "a_rank_has_anothers_shard": (GREEDY_TINY, None),
    "keys_and_values_are_swapped_on_a_rank": (GREEDY_TINY, None),
    "a_tensor_is_missing": (GREEDY_TINY, "layers.3.mlp.up_proj.weight is not among the weights of rank 1"),
    "a_tensor_has_another_dtype": (GREEDY_TINY, "norm.weight of rank 1 is torch.bfloat16, the graph was compiled for"),
    "a_tensor_has_another_shape": (GREEDY_TINY, "lm_head.weight of rank 1 has shape"),
    "tokens_stay_int64": (GREEDY_TINY, "input 0 is torch.int64, the graph was compiled for torch.int32"),
}
# what is injected -> what is said of it, of a device that loads and generates
FAULTS = {
    "fail": ({"NEURON_EMULATOR_FAULTS": "fail=12"}, "execution 12 failed"),
    "die": ({"NEURON_EMULATOR_FAULTS": "die=1@12"}, "NeuronCore 1 does not answer"),
    "memory": ({"NEURON_EMULATOR_CORE_GB": "0.001"}, "out of device memory on NeuronCore 0"),
}


@pytest.fixture(scope="module")
def run(random_checkpoints, tmp_path_factory):
    """Results of jobs, each made of a cell and more keys, in one call of emulated.py per release."""

    def jobs_of(release, jobs):
        assert release
        out = tmp_path_factory.mktemp(f"device-{release.version}")
        checkpoints = {**random_checkpoints, "tiny": str(running.TINY)}
        jobs = [{**cell.job(checkpoints), "name": name, **more} for name, cell, more in jobs]
        return running.run(release, jobs, out), out

    return jobs_of


@pytest.fixture(scope="session")
def expected(random_checkpoints):
    return lambda cell: cell.expected({**random_checkpoints, "tiny": str(running.TINY)})


def release_of(nxd_releases):
    reason = running.missing() or (None if nxd_releases else "needs --nxd-source NXD_SRC:NXDI_SRC")
    if reason:
        pytest.skip(reason)
    return nxd_releases[0]


@pytest.fixture(scope="module")
def results(nxd_releases, run):
    """Of all jobs whose artifacts nothing else needs."""
    jobs = [(twin, cell, {"twin": twin}) for twin, (cell, _) in TWINS.items()]
    jobs += [(f"fault-{name}", GREEDY_TINY, {"environment": environment}) for name, (environment, _) in FAULTS.items()]
    jobs += [("nan", tiny("nan", {}), {"kind": "project_generate", "groups": [1], "environment": {"NEURON_EMULATOR_FAULTS": "nan=8"}})]
    jobs += [("fault-fail-async", ASYNC, {"environment": {"NEURON_EMULATOR_FAULTS": "fail=12"}})]
    jobs += [("groups", CONTINUOUS, {"kind": "project_generate", "groups": [1, 2, 3, 4]})]
    jobs += [("left-out", CONTINUOUS, {"kind": "left_out", "prompts": [prompt(9), prompt(60, 1), prompt(30, 2)]})]
    jobs += [("memory", GREEDY_TINY, {"kind": "memory"})]
    return run(release_of(nxd_releases), jobs)[0]


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


def test_generate_takes_any_number_of_prompts_with_continuous_batching(results, expected):
    """One prompt, or a last group of one, is fewer rows than the library's default sampling parameters have."""
    got = results["groups"]
    assert "error" not in got, got
    for tokens in got["tokens"]:
        for row, prompt_ in zip(tokens, REQUESTS):
            pass
    assert [len(tokens) for tokens in got["tokens"]] == [1, 2, 3, 4]
