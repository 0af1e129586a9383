import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "contrib" / "nxd_cpu"

sys.path.append(str(RUNTIME))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A random SmolLM3 of three layers, the middle one NoPE, with a vocabulary and an intermediate size that no TP
    degree here divides."""
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.manual_seed(0)
    config = SmolLM3Config(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=98,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1],
        pad_token_id=3,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = SmolLM3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    path = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(checkpoint):
    from transformers import SmolLM3ForCausalLM

    return SmolLM3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def build(checkpoint):
    """build(**options) -> the application, not compiled."""
    from neuronx_distributed_inference.models.config import NeuronConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM, SmolLM3InferenceConfig

    defaults = dict(
        batch_size=3,
        ctx_batch_size=2,
        seq_len=32,
        max_context_length=16,
        is_continuous_batching=True,
        save_sharded_checkpoint=True,
        torch_dtype=torch.float32,
    )

    def build(**options):
        config = NeuronConfig(**{**defaults, **options})
        config = SmolLM3InferenceConfig(config, load_config=load_pretrained_config(checkpoint))
        return NeuronSmolLM3ForCausalLM(str(checkpoint), config)

    return build


@pytest.fixture(scope="session")
def compiled(build, tmp_path_factory):
    """compiled(**options) -> a loaded application and its folder, made once per options."""
    made = {}

    def compiled(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp("artifact")
            app = build(**options)
            app.compile(str(folder))
            app = type(app)(str(folder))
            app.load(str(folder))
            made[key] = app, folder
        return made[key]

    return compiled
