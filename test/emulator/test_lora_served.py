"""LoRA adapters served unmerged on the emulated device: each row its own, against PEFT's merge on transformers."""

import subprocess

import pytest
import running
import torch
from cells import CONTINUOUS_1, Cell
from peft import PeftModel
from places import ROOT, TINY
from reference import make_adapter
from test_lora import LINEARS, NEW_TOKENS, PROMPTS, merged_tokens
from transformers import AutoTokenizer, SmolLM3ForCausalLM

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


TEXTS = ["The square root of 144 is", "12 times 12 equals", "7 * 8 ="]


def answer(adapter, text: str) -> str:
    """PEFT's, or without an adapter the model's own."""
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), SmolLM3ForCausalLM.from_pretrained(TINY)
    model = PeftModel.from_pretrained(model, adapter).eval() if adapter else model.eval()
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    mask = torch.ones_like(ids)
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    return text + tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def test_adapters_by_flags(nxd_releases, tmp_path):
    if reason := running.missing() or (None if nxd_releases else "needs --nxd-source NXD_SRC:NXDI_SRC"):
        pytest.skip(reason)
    adapters = {
        "all": make_adapter(TINY, tmp_path / "all", target_modules=LINEARS),
        "two": make_adapter(TINY, tmp_path / "two", target_modules=["q_proj", "down_proj"], r=3),
        "none": None,
    }
    environment = running.environment(
        nxd_releases[0],
        NEURON_EMULATOR_CACHE=str(tmp_path / "executables"),
        BASE_COMPILE_WORK_DIR=f"{tmp_path}/work/",
    )

    def run(script: str, *args) -> str:
        command = [running.PYTHON, ROOT / f"scripts/{script}.py", *args, "--device", "neuron"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, timeout=500)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    shape = "--model", "tiny", "--tp", 2, "--batch-size", 3, "--seq-len", 64, "--dtype", "float32"
    flags = [word for name in ("two", "all") for word in ("--lora", f"{name}={adapters[name]}")]
    artifact = tmp_path / "artifact"
    run("compile", *shape, *flags, "--output", artifact)
    names = ["two", "none", "all"]
    chosen = [word for name in names for word in ("--adapter", name)]
    said = run("generate", artifact, *TEXTS, *chosen, "--max-new-tokens", NEW_TOKENS)
    expected = [answer(adapters[name], text) for name, text in zip(names, TEXTS)]
    assert said == "".join(f"[{row}] {text}\n" for row, text in enumerate(expected))
    # fewer prompts than rows; without the flag the model's own answer
    for name, flag in (("all", ["--adapter", "all"]), ("none", [])):
        said = run("generate", artifact, TEXTS[0], *flag, "--max-new-tokens", NEW_TOKENS)
        assert said == answer(adapters[name], TEXTS[0]) + "\n"
    assert len({answer(adapter, TEXTS[0]) for adapter in adapters.values()}) == 3
