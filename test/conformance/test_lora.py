"""The real library serves two LoRA adapters unmerged, each row its own: against PEFT's merge on transformers."""

from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from reference import make_adapter
from transformers import SmolLM3ForCausalLM

from nxd_sources.release import run_real
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.adapter import check_serving

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[7, 45, 101, 9, 200], [250, 3, 77]]
NEW_TOKENS = 16
# tp_degree, the adapter of each row, the size that MLPs are padded to
PLACES = [
    (1, [0, 1], None),
    (1, [1, 0], None),
    (2, [0, 1], None),
    (8, [1, 0], None),
    (2, [1, 0], 240),
    (8, [0, 1], 240),
]


@pytest.fixture(scope="module")
def adapters(random_checkpoints, tmp_path_factory):
    folder, checkpoint = tmp_path_factory.mktemp("adapters"), random_checkpoints["plain"]
    return [
        make_adapter(checkpoint, folder / "all", target_modules=LINEARS),
        make_adapter(
            checkpoint,
            folder / "two",
            target_modules=["q_proj", "down_proj"],
            layers_to_transform=[0, 3],
            r=3,
            use_rslora=True,
        ),
    ]


def test_each_row_has_its_own_adapter(adapters, nxd_releases, random_checkpoints, tmp_path):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC")
    checkpoint = random_checkpoints["plain"]
    expected = [[merged_tokens(checkpoint, adapter, prompt) for prompt in PROMPTS] for adapter in adapters]
    assert len({tuple(tokens) for of_adapter in expected for tokens in of_adapter}) == 4
    paths = {str(i): str(adapter) for i, adapter in enumerate(adapters)}
    jobs = [
        {
            "name": f"tp{tp}-{''.join(map(str, rows))}-{padded}",
            "kind": "generate",
            "checkpoint": checkpoint,
            "prompts": PROMPTS,
            "new_tokens": NEW_TOKENS,
            "adapter_ids": rows,
            "neuron": {
                "tp_degree": tp,
                "batch_size": 2,
                "seq_len": 64,
                "padded_intermediate_size": padded,
                "lora_config": {"max_loras": 2, "max_lora_rank": 4, "batch_size": 2, "lora_ckpt_paths": paths},
            },
        }
        for tp, rows, padded in PLACES
    ]
    for release in nxd_releases:
        results = run_real(release, jobs, tmp_path / release.version)
        for job in jobs:
            result = results[job["name"]]
            assert "error" not in result, result["error"]
            wanted = [expected[adapter][row] for row, adapter in enumerate(job["adapter_ids"])]
            assert result["tokens"] == wanted, (release.version, job["name"])


def merged_tokens(checkpoint, adapter, prompt):
    base = SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).merge_and_unload().eval()
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
    )
    return output[0, len(prompt) :].tolist()


def configs(checkpoint, folder, targets, tp_degree=2, fused_qkv=False, quantized=False, **lora):
    ensure_neuronx()
    from neuronx_distributed_inference.models.config import NeuronConfig

    paths = dict(lora_ckpt_paths={"a": str(folder)}, lora_ckpt_paths_cpu={})
    values = dict(target_modules=targets, batch_size=1, max_lora_rank=4, **paths)
    neuron_config = NeuronConfig(tp_degree=tp_degree, batch_size=1, fused_qkv=fused_qkv, quantized=quantized)
    neuron_config.lora_config = SimpleNamespace(**{**values, **lora})
    return read_config(checkpoint), neuron_config


MERGE = "merge it into the weights"


@pytest.mark.parametrize(
    "adapter, changes, named",
    [
        ({"target_modules": ["q_proj"]}, {"fused_qkv": True}, ["adapter for q_proj", "fused_qkv", MERGE]),
        ({"target_modules": ["v_proj", "o_proj"]}, {"tp_degree": 16}, ["adapter for v_proj", "tp_degree 16", MERGE]),
        ({"target_modules": ["up_proj"]}, {"tp_degree": 3}, ["tp_degree 3 does not divide hidden_size, 128"]),
        ({"target_modules": ["embed_tokens"]}, {}, ["adapter for embed_tokens", MERGE]),
        ({"target_modules": ["lm_head"]}, {}, ["adapter for lm_head", MERGE]),
        ({"target_modules": ["up_proj"]}, {"batch_size": 2}, ["lora_config.batch_size is 2", "batch_size 1"]),
        (
            {"target_modules": ["up_proj"], "alpha_pattern": {"up_proj": 3}},
            {},
            ["alpha_pattern is {'up_proj': 3}", MERGE],
        ),
        ({"target_modules": ["up_proj"], "use_dora": True}, {}, ["use_dora is True", MERGE]),
        ({"target_modules": ["up_proj"], "modules_to_save": ["norm"]}, {}, ["modules_to_save is ['norm']", MERGE]),
        ({"target_modules": r".*\.up_proj"}, {}, ["a list of target_modules", MERGE]),
        ({"target_modules": ["up_proj"]}, {"quantized": True}, ["quantized weights", MERGE]),
        ({"target_modules": ["up_proj"]}, {"max_lora_rank": 2}, ["has rank 4, max_lora_rank is 2"]),
        (
            {"target_modules": ["up_proj", "q_proj"], "rank_pattern": {"q_proj": 1}},
            {},
            ["q_proj.lora_A.weight has rank 1", "rank 2 and more", MERGE],
        ),
    ],
)
def test_what_cannot_be_served_is_named(adapter, changes, named, random_checkpoints, tmp_path):
    checkpoint = random_checkpoints["plain"]
    make_adapter(checkpoint, tmp_path, **adapter)
    with pytest.raises(SmolLM3Error) as error:
        check_serving(*configs(checkpoint, tmp_path, adapter["target_modules"], **changes))
    assert "\n" not in str(error.value) and [part for part in named if part not in str(error.value)] == []


def test_what_can_be_served(adapters, random_checkpoints):
    for tp_degree in (1, 2, 4, 8):
        check_serving(*configs(random_checkpoints["plain"], adapters[0], LINEARS, tp_degree))
    check_serving(*configs(random_checkpoints["plain"], adapters[0], ["o_proj", "up_proj"], fused_qkv=True))
