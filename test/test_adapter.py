"""--merge-adapter: PEFT adapters merged while the weights are sharded, against PEFT on transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import written
from peft import LoraConfig, PeftModel
from reference import make_adapter
from safetensors.torch import load_file, save_file
from transformers import SmolLM3ForCausalLM

from smollm3_neuron.artifact.build import Callbacks, compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.altered_reference import load_altered_reference
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.adapter import Adapter

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[7, 45, 101, 9, 200], [250, 3, 77]]
NEW_TOKENS = 12
SETTINGS = Settings(tp_degree=2, batch_size=2, seq_len=64, torch_dtype="float32")
CASES = {
    "every linear": ("plain", dict(target_modules=LINEARS)),
    "untied head and embeddings": ("untied", dict(target_modules=["embed_tokens", "lm_head", "v_proj"])),
    "patterns": (
        "plain",
        dict(
            target_modules=LINEARS, rank_pattern={"o_proj": 2, r"layers\.1\.mlp\..*": 3},
            alpha_pattern={"layers.2.self_attn.q_proj": 64},
        ),
    ),
    "rslora": ("plain", dict(target_modules=LINEARS, use_rslora=True, r=5)),
    "some layers": ("plain", dict(target_modules=["q_proj", "down_proj"], layers_to_transform=[1, 4])),
    "fan_in_fan_out": ("plain", dict(target_modules=["up_proj", "o_proj"], fan_in_fan_out=True)),
    "trained biases": ("biases", dict(target_modules=["q_proj", "down_proj"], bias="all")),
    "bias of lora_B": ("biases", dict(target_modules=["k_proj", "gate_proj"], lora_bias=True)),
    "dora": ("plain", dict(target_modules=LINEARS, use_dora=True)),
    "whole modules": (
        "untied", dict(target_modules=["q_proj"], modules_to_save=["lm_head", "input_layernorm", "up_proj", "norm"]),
    ),
    "saved embeddings": ("plain", dict(target_modules=["q_proj"], modules_to_save=["embed_tokens"])),
    "saved tied head": ("plain", dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "tied embeddings": ("plain", dict(target_modules=["embed_tokens", "q_proj"])),
    "tied head": ("plain", dict(target_modules=["lm_head"])),
    "embeddings and head kept tied": ("plain", dict(target_modules=["embed_tokens"], ensure_weight_tying=True)),
}  # fmt: skip


def load_peft(checkpoint, adapter, dtype=torch.float32):
    return PeftModel.from_pretrained(SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=dtype), adapter).eval()


def tokens_of(model):
    return [
        model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def swap(random_checkpoints, tmp_path_factory):
    """The artifact of a checkpoint, compiled once, with an adapter in its weights."""
    ensure_neuronx()
    folder = tmp_path_factory.mktemp("artifacts")

    def swapped(name, adapter):
        output = folder / name
        standing = output.exists()
        return compile_artifact(
            Path(random_checkpoints[name]), output, SETTINGS, "cpu", weights_only=standing, merge_adapter=adapter
        )

    return swapped


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_pefts(case, swap, random_checkpoints, tmp_path):
    checkpoint, config = CASES[case]
    adapter = make_adapter(random_checkpoints[checkpoint], tmp_path / "adapter", **config)
    artifact = swap(checkpoint, adapter)
    found = [result.tokens for result in generate(artifact.load(), PROMPTS, NEW_TOKENS, pad_token_id=0)]
    reference = load_peft(random_checkpoints[checkpoint], adapter)
    expected = tokens_of(reference)
    assert found == expected
    assert found != tokens_of(SmolLM3ForCausalLM.from_pretrained(random_checkpoints[checkpoint]))
    assert tokens_of(load_altered_reference(random_checkpoints[checkpoint], adapter=adapter)) == expected
    if "tied" not in case:
        assert tokens_of(reference.merge_and_unload()) == expected


def weights_of(artifact):
    return [file.read_bytes() for file in sorted((artifact.path / "weights").iterdir())]


def test_another_adapter_is_another_artifact(random_checkpoints, tmp_path):
    ensure_neuronx()
    checkpoint = random_checkpoints["plain"]
    adapters = [
        make_adapter(checkpoint, tmp_path / str(alpha), target_modules=["q_proj"], lora_alpha=alpha) for alpha in (4, 8)
    ]

    def compiled(adapter, **options):
        steps = []
        artifact = compile_artifact(
            Path(checkpoint),
            tmp_path / "artifact",
            SETTINGS,
            "cpu",
            merge_adapter=adapter,
            callbacks=Callbacks(on_step=steps.append),
            **options,
        )
        return artifact, steps[-1].startswith("nothing to do")

    base, _ = compiled(None)
    of_base = weights_of(base)
    first, was_there = compiled(adapters[0])
    assert not was_there and first.manifest["model"]["adapter"]["folder"] == str(adapters[0])
    assert compiled(adapters[0])[1]
    of_first = weights_of(first)
    second, was_there = compiled(adapters[1], weights_only=True)
    assert not was_there and weights_of(second) != of_first and weights_of(second) != of_base
    assert weights_of(compiled(adapters[0], weights_only=True)[0]) == of_first
    assert weights_of(compiled(None, weights_only=True)[0]) == of_base
    rewrite(adapters[0], lora_alpha=16)
    assert not compiled(adapters[0])[1]


def rewrite(adapter, change_tensors=None, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    if change_tensors:
        tensors = load_file(adapter / "adapter_model.safetensors")
        change_tensors(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED = {
    "another method": (dict(peft_type="IA3"), None, ["peft_type is 'IA3'", "'LORA'"]),
    "repeated layers": (dict(layer_replication=[[0, 2]]), None, ["layer_replication is [[0, 2]]"]),
    "single rows": (dict(trainable_token_indices=[1, 2]), None, ["trainable_token_indices is [1, 2]"]),
    "a parameter": (dict(target_parameters=["weight"]), None, ["target_parameters is ['weight']"]),
    "invoked later": (dict(alora_invocation_tokens=[5]), None, ["alora_invocation_tokens is [5]"]),
    "not known yet": (dict(use_newlora=True), None, ["use_newlora is True"]),
    "trained on other weights": (dict(init_lora_weights="pissa"), None, ["'pissa'", "path_initial_model_for"]),
    "another rank": (dict(r=8), None, ["q_proj.lora_A.weight has rank 4", "says 8"]),
    "no alpha": (dict(lora_alpha=None), None, ["lora_alpha is None"]),
    "no pattern": (dict(alpha_pattern={"(": 1}), None, ["alpha_pattern has '('"]),
    "unknown tensor": ({}, lambda t: t.update({"base_model.model.score.weight": torch.ones(2, 2)}), ["score.weight"]),
    "another model": ({}, lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64)}), ["shape (4, 64)", "(4, 128)"]),
    "half of it": ({}, lambda t: t.pop(f"{Q}.lora_B.weight"), ["lora_A.weight is there without its other half"]),
    "nothing": ({}, lambda t: t.clear(), ["no tensors in it"]),
    "a bias where none is": (
        {}, lambda t: t.update({f"{Q}.lora_B.bias": torch.ones(128)}), ["lora_bias needs a bias", "q_proj.bias"],
    ),
    "a trained bias where none is": (
        {}, lambda t: t.update({f"{Q}.base_layer.bias": torch.ones(128)}), ["fits no tensor", "q_proj.bias"],
    ),
    "dora on embeddings": (
        {},
        lambda t: t.update({
            "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 256),
            "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(128, 4),
            "base_model.model.model.embed_tokens.lora_magnitude_vector": torch.ones(256),
        }),
        ["use_dora on an embedding"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def an_adapter(random_checkpoints, tmp_path_factory):
    return make_adapter(random_checkpoints["plain"], tmp_path_factory.mktemp("adapter"), target_modules=["q_proj"])


def read(adapter, checkpoint):
    return Adapter(adapter, read_config(checkpoint))


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_named(case, an_adapter, random_checkpoints, tmp_path):
    changes, change_tensors, named = REFUSED[case]
    adapter = shutil.copytree(an_adapter, tmp_path / "adapter")
    rewrite(adapter, change_tensors, **changes)
    with pytest.raises(SmolLM3Error) as error:
        read(adapter, random_checkpoints["plain"])
    assert "\n" not in str(error.value) and [part for part in named if part not in str(error.value)] == []


def test_faults_of_files_are_named(an_adapter, random_checkpoints, tmp_path):
    with pytest.raises(SmolLM3Error, match="none: no adapter_config.json there"):
        read(tmp_path / "none", random_checkpoints["plain"])
    adapter = shutil.copytree(an_adapter, tmp_path / "adapter")
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SmolLM3Error, match="adapter_model.safetensors: not a whole safetensors file"):
        read(adapter, random_checkpoints["plain"])
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(SmolLM3Error, match="no adapter_model.safetensors there"):
        read(adapter, random_checkpoints["plain"])
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(SmolLM3Error, match="adapter_config.json: not valid JSON"):
        read(adapter, random_checkpoints["plain"])


def as_it_trains(tensors):
    """DoRA's magnitudes under the name that PEFT's own modules have for them."""
    for key in [key for key in tensors if key.endswith(".lora_magnitude_vector")]:
        tensors[f"{key}.weight"] = tensors.pop(key)


FORMS = [
    *((case, "0.7") for case in ("every linear", "patterns", "saved embeddings", "tied embeddings")),
    *((case, version) for version in ("0.10", "0.17", "0.18") for case in ("patterns", "rslora", "dora")),
]


@pytest.mark.parametrize("case, version", FORMS)
def test_an_adapter_of_another_version_is_read_the_same(case, version, random_checkpoints, tmp_path):
    """The installed PEFT writes the newest form; `version` wrote fewer fields, and those that it has mean the same."""
    checkpoint, config = CASES[case]
    newest = make_adapter(random_checkpoints[checkpoint], tmp_path / "newest", **config)
    other = shutil.copytree(newest, tmp_path / "other")
    fields = written.read(newest / "adapter_config.json")
    older = written.adapter_config_of(version, fields)
    (other / "adapter_config.json").write_text(json.dumps(older))
    rewrite(other, as_it_trains)
    assert len(older) < len(fields)
    assert_merged_equal(*(read(folder, random_checkpoints[checkpoint]) for folder in (newest, other)))


def test_an_adapter_that_transformers_itself_saved(random_checkpoints, tmp_path):
    """`add_adapter` and `save_pretrained` of the model, without PEFT's own model around it."""
    checkpoint, how = random_checkpoints["plain"], dict(target_modules=LINEARS, r=4, lora_alpha=12)
    of_peft = make_adapter(checkpoint, tmp_path / "peft", **how)
    model = SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.add_adapter(LoraConfig(**how))
    model.load_state_dict(load_peft(checkpoint, of_peft).base_model.model.state_dict())
    model.save_pretrained(tmp_path / "transformers")
    assert_merged_equal(read(of_peft, checkpoint), read(tmp_path / "transformers", checkpoint))


def assert_merged_equal(one: Adapter, other: Adapter) -> None:
    assert one.scaling == other.scaling and one.roles.keys() == other.roles.keys() != set()
    for name, roles in one.roles.items():
        assert roles.keys() == other.roles[name].keys()
        for role, key in roles.items():
            assert torch.equal(one.file.get_tensor(key), other.file.get_tensor(other.roles[name][role]))


@pytest.mark.parametrize("use_dora", [False, True])
def test_bfloat16_is_rounded_once_as_by_peft(use_dora, random_checkpoints, tmp_path):
    checkpoint = random_checkpoints["plain"]
    adapter = make_adapter(checkpoint, tmp_path / "adapter", target_modules=LINEARS, use_dora=use_dora)
    base = SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).state_dict()
    merged = read(adapter, checkpoint)
    unequal = 0
    for name, expected in load_peft(checkpoint, adapter, torch.bfloat16).merge_and_unload().state_dict().items():
        found = merged.merged(name.removeprefix("model."), base[name], torch.bfloat16)
        rows = torch.cat([found[at : at + 7] for at in range(0, len(found), 7)])
        torch.testing.assert_close(rows, expected, rtol=2**-7, atol=1e-6)
        unequal += (rows != expected).sum().item()
    assert unequal < 1e-4 * sum(tensor.numel() for tensor in base.values())
