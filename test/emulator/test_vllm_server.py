"""`vllm serve` from an artifact of --for-vllm, on an emulated Neuron device; it needs what test_vllm.py does."""

import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from places import TINY
from reference import reference_tokens
from transformers import AutoTokenizer
from vllm_on_device import compile_for_server, server

pytestmark = pytest.mark.emulator
PROMPTS = ["The square root of 144 is", "7 * 8 =", "The capital of France is", "Once upon a time", "2 + 2 =", "A"]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """compiled(pair, tp): the words of the command that serves an artifact, and the folder of its servers."""
    made = {}

    def get(pair, tp):
        if (pair, tp) not in made:
            scratch = tmp_path_factory.mktemp(f"served-{pair.vllm}-tp{tp}")
            made[pair, tp] = compile_for_server(pair, scratch, tp), scratch
        return made[pair, tp]

    return get


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def command(request, pair, compiled):
    return compiled(pair, request.param)


@pytest.fixture(scope="module")
def served(pair, command):
    words, scratch = command
    with server(pair, scratch, words) as started:
        yield started


def expected(prompt: str, new_tokens: int = 12) -> str:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokens = reference_tokens(str(TINY), tuple(tokenizer(prompt)["input_ids"]), new_tokens, ())
    return tokenizer.decode(tokens, skip_special_tokens=True)


def test_requests_come_go_and_are_cancelled(served):
    """More requests than slots; three are broken off while they stream, and take nothing along."""
    before = served.metric("vllm:generation_tokens_total")
    streaming = threading.Barrier(4)

    def break_off(prompt):
        with urllib.request.urlopen(served.request(prompt, 230, stream=True), timeout=300) as response:
            for _ in range(4):
                response.readline()
            streaming.wait(60)

    with ThreadPoolExecutor(10) as pool:
        broken = [pool.submit(break_off, prompt) for prompt in PROMPTS[:3]]
        whole = pool.submit(served.complete, PROMPTS[3], 60)
        streaming.wait(60)
        later = [pool.submit(served.complete, prompt) for prompt in PROMPTS]
        for request in broken:
            request.result()
        assert whole.result() == expected(PROMPTS[3], 60)
        assert [request.result() for request in later] == [expected(prompt) for prompt in PROMPTS]
    deadline = time.monotonic() + 30
    while served.metric("vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.5)
    # had they gone on they would have 3 times 230 tokens
    assert served.metric("vllm:generation_tokens_total") - before < 60 + 12 * len(PROMPTS) + 230
    assert served.metric("vllm:num_requests_running") == 0


def test_a_second_start_compiles_nothing(pair, command, served, tmp_path):
    """Neither the library, which would do it in its work folder, nor XLA, whose executables are kept by digest."""
    words, scratch = command
    executables = {file.name for file in (scratch / "executables").iterdir()}
    assert executables and not (scratch / "work").exists()
    with server(pair, tmp_path, words, NEURON_EMULATOR_CACHE=str(scratch / "executables")) as started:
        assert started.complete(PROMPTS[0]) == expected(PROMPTS[0])
    assert {file.name for file in (scratch / "executables").iterdir()} == executables
    assert not (scratch / "work").exists() and not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    "fault, said", [("fail=12", "execution 12 failed"), ("die=1@12", "NeuronCore 1 does not answer")]
)
def test_a_server_whose_device_fails_answers_500_and_ends(pair, compiled, tmp_path, fault, said):
    """vLLM 0.16 has the 500 in the body alone, and only the device's own line says why."""
    words, scratch = compiled(pair, 2)
    executables = str(scratch / "executables")
    with server(pair, tmp_path, words, NEURON_EMULATOR_FAULTS=fault, NEURON_EMULATOR_CACHE=executables) as started:
        status, body = started.answer(PROMPTS[0], 60)
        assert (status if pair.vllm == "0.13" else body["error"]["code"]) == 500, (status, body)
        assert started.process.wait(120) is not None
    assert f"emulated Neuron device: {said}" in started.log.read_text()


def test_a_cache_that_is_not_a_number_is_one_requests_only(pair, compiled, tmp_path):
    """A server does not see it, and answers the request whose cache it was wrongly; the next ones have their own."""
    words, scratch = compiled(pair, 2)
    variables = {"NEURON_EMULATOR_FAULTS": "nan=8", "NEURON_EMULATOR_CACHE": str(scratch / "executables")}
    with server(pair, tmp_path, words, **variables) as started:
        assert started.complete(PROMPTS[1]) != expected(PROMPTS[1])
        assert [started.complete(prompt) for prompt in PROMPTS] == [expected(prompt) for prompt in PROMPTS]


def test_what_cannot_be_loaded_ends_the_start_with_a_line(pair, compiled, tmp_path, nxd_releases):
    """Memory that runs out, the weights of two ranks swapped, and a graph of another release."""
    words, scratch = compiled(pair, 2)
    executables = str(scratch / "executables")
    name, folder = words[0].split("=", 1)
    swapped = tmp_path / "swapped"
    shutil.copytree(folder, swapped)
    files = [swapped / f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in (0, 1)]
    files[0].rename(swapped / "of-rank-0")
    files[1].rename(files[0])
    (swapped / "of-rank-0").rename(files[1])
    starts = {
        "memory": (words, {"NEURON_EMULATOR_CORE_GB": "0.001"}, "out of device memory on NeuronCore 0"),
        "swapped": ([f"{name}={swapped}", *words[1:]], {}, "the weights of rank 1 are in it, not those of rank 0"),
    }
    others = [release for release in nxd_releases if release.version != pair.release.version]
    if others:
        source = f"{others[0].nxd}:{others[0].nxdi}"
        starts["release"] = (words, {"NXD_SOURCE": source}, "made with neuronx-distributed")
    for start, (command, variables, said) in starts.items():
        with (
            pytest.raises(RuntimeError, match="no server"),
            server(pair, tmp_path / start, command, NEURON_EMULATOR_CACHE=executables, **variables),
        ):
            pass
        assert said in (tmp_path / start / "log").read_text(), start
