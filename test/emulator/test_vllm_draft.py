"""vLLM with a draft, which vllm-neuron fuses with the model, on an emulated Neuron device: see test_vllm.py for what it
needs.
"""

import pytest
from reference import make_checkpoint
from test_vllm import GREEDY, expected, requests, tokens
from vllm_on_device import offline

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
        with pytest.raises(RuntimeError, match="draft model is not supported"):
            run()
        return
    (answers,) = run()
    assert tokens(answers) == expected(checkpoint, prompts, lengths)
