"""One rank of a model in the library's CPU mode: python -m neuron_on_cpu.rank FOLDER COMPILED CHECKPOINT RANK

FOLDER holds the config, the socket of the parent and the store of the process group. COMPILED holds the shards, if they
were written; else they are cut from CHECKPOINT.
"""

import os
import pickle
import sys
import traceback
from multiprocessing import connection
from pathlib import Path

import torch

from nxd_sources import closed_sdk


def start(folder: str, compiled: str, checkpoint: str, rank: int):
    closed_sdk.install()
    from neuronx_distributed_inference.models import application_base
    from safetensors.torch import load_file

    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    config = NeuronSmolLM3ForCausalLM.get_config_cls().load(folder)
    config.neuron_config.on_cpu = True
    if not hasattr(NeuronSmolLM3ForCausalLM, "_get_captured_tensors_offset"):
        NeuronSmolLM3ForCausalLM._get_captured_tensors_offset = lambda self: 0  # see nxd_sources/cpu_mode.py
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=config.neuron_config.tp_degree
    )
    model = NeuronSmolLM3ForCausalLM(checkpoint, config)
    shard = Path(compiled) / f"weights/tp{rank}_sharded_checkpoint.safetensors"
    if shard.is_file():
        application_base.get_sharded_checkpoint = lambda *args: None
        model.checkpoint_loader_fn = lambda *args: load_file(shard)
    model.to_cpu()
    for wrapper in model.models:
        wrapper.model.register_forward_pre_hook(_choose_bucket)
    return model


def _choose_bucket(module, arguments):
    """Tells the module the bucket that it was called with, as tracing tells each graph its own."""
    input_ids, attention_mask = arguments[:2]
    if module.neuron_config.is_prefix_caching:
        module.n_active_tokens = input_ids.shape[1]
        module.prefix_size = attention_mask.shape[1] if attention_mask.dim() == 2 else 0
        module.n_positions = module.prefix_size
        if module.n_active_tokens > 1:
            module.n_positions = min(
                module.prefix_size + module.n_active_tokens, module.neuron_config.max_context_length
            )
    else:
        module.n_positions = attention_mask.shape[-1]


def main(folder: str, compiled: str, checkpoint: str, rank: str) -> None:
    parent = connection.Client(f"{folder}/socket", "AF_UNIX")

    def send(answer):
        parent.send_bytes(pickle.dumps(answer))

    try:
        model = start(folder, compiled, checkpoint, int(rank))
        send("ready")
        while True:
            args, kwargs = pickle.loads(parent.recv_bytes())
            if model.neuron_config.is_prefix_caching:
                # CPU mode picks the answers by seq_ids, a device takes them from the first on
                kwargs["seq_ids"] = torch.arange(len(kwargs["seq_ids"]))
            with torch.inference_mode():
                send(model(*args, **kwargs))
    except EOFError:
        pass
    except Exception:
        send(RuntimeError(f"rank {rank}:\n{traceback.format_exc()}"))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # the library's exit hooks expect a device
