"""vLLM with a draft, which vllm-neuron fuses with the model, on an emulated Neuron device: see test_vllm.py for what it
needs.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import test_vllm_server
from places import TINY
from reference import make_checkpoint
from test_vllm import GREEDY, expected, requests, tokens
from vllm_on_device import compile_for_server, offline, server

pytestmark = pytest.mark.emulator
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, SMALL], ids=["itself", "random"])
def test_more_requests_than_slots_with_a_draft(pair, tmp_path, changes):
    """The model as its own draft, and one that is never right; vLLM 0.13 knows no draft models and says so."""
    checkpoint, draft = make_checkpoint(tmp_path / "plain"), make_checkpoint(tmp_path / "draft", **changes)
    prompts, lengths = requests()
    params = [{"max_tokens": length} for length in lengths]
    speculation = {"model": draft, "num_speculative_tokens": 4, "method": "draft_model"}

    def run():
        return offline(
            pair, tmp_path / "run", checkpoint, prompts, params, GREEDY, tensor_parallel_size=2,
            speculative_config=speculation,
        )  # fmt: skip

    if pair.vllm == "0.13":
        with pytest.raises(RuntimeError, match="Draft model speculative decoding is not supported yet"):
            run()
        return
    (answers,) = run()
    assert tokens(answers) == expected(checkpoint, prompts, lengths)


def test_an_artifact_with_a_draft_is_served(pair, tmp_path):
    """By the command that compile.py --for-vllm prints; the draft is `tiny` itself."""
    if pair.vllm == "0.13":
        pytest.skip("vLLM 0.13 knows no draft models")
    draft = shutil.copytree(TINY, tmp_path / "draft")
    words = compile_for_server(pair, tmp_path, 2, "--draft", draft, "--speculation-length", "4")
    assert "--speculative-config" in words
    with server(pair, tmp_path, words) as served, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(served.complete, test_vllm_server.PROMPTS))
    assert answers == [test_vllm_server.expected(prompt) for prompt in test_vllm_server.PROMPTS]
