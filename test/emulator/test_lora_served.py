"""LoRA adapters served unmerged on the emulated device: each row its own, against PEFT's merge on transformers."""

import pytest
import running
from cells import CONTINUOUS_1, Cell
from reference import make_adapter
from test_lora import LINEARS, NEW_TOKENS, PROMPTS, merged_tokens

pytestmark = pytest.mark.emulator

PLACES = {
    "batch": {"tp_degree": 2, "batch_size": 2},
    "continuous-batching": {**CONTINUOUS_1, "batch_size": 2},
}


def test_each_row_has_its_own_adapter(nxd_releases, random_checkpoints, tmp_path):
    if reason := running.missing() or (None if nxd_releases else "needs --nxd-source NXD_SRC:NXDI_SRC"):
        pytest.skip(reason)
    checkpoint = random_checkpoints["plain"]
    adapters = [
        make_adapter(checkpoint, tmp_path / "all", target_modules=LINEARS),
        make_adapter(checkpoint, tmp_path / "two", target_modules=["q_proj", "down_proj"], r=3),
    ]
    paths = {str(number): str(adapter) for number, adapter in enumerate(adapters)}
    lora = {"max_loras": 2, "max_lora_rank": 4, "batch_size": 2, "lora_ckpt_paths": paths}
    jobs = []
    for name, neuron in PLACES.items():
        cell = Cell(name, {**neuron, "seq_len": 64, "lora_config": lora}, PROMPTS, new_tokens=NEW_TOKENS)
        jobs.append({**cell.job(random_checkpoints), "adapter_ids": [1, 0]})
    results = running.run(nxd_releases[0], jobs, tmp_path / "out")
    wanted = [merged_tokens(checkpoint, adapters[adapter], row) for adapter, row in zip([1, 0], PROMPTS)]
    for name in PLACES:
        assert "error" not in results[name], results[name]["traceback"]
        assert results[name]["tokens"] == wanted, name
