"""What vllm-neuron asks of a model, and of an artifact that its server starts from. Imports no torch.

Written against vllm-neuron 0.2.0: its defaults, and NEURON_COMPILED_ARTIFACTS, the folder that it loads in place of
compiling.
"""

import json
import os
import shlex
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ..artifact.folder import MANIFEST, Artifact, open_artifact
from ..artifact.settings import Settings
from ..errors import SmolLM3Error
from ..generate.chat import VLLM_TEMPLATE
from ..model.config import REQUIRED

FOLDER = "NEURON_COMPILED_ARTIFACTS"
ON_DEVICE = {"dynamic": True, "deterministic": False}
FLAGS = {
    "tp_degree": "--tensor-parallel-size",
    "batch_size": "--max-num-seqs",
    "seq_len": "--max-model-len",
    "torch_dtype": "--dtype",
}
BLOCKS = {"is_prefix_caching", "pa_block_size", "pa_num_blocks"}  # flags of the server's own, see serve_command


def settings_of_server(settings: Settings, sampling_given: bool = False) -> Settings:
    """`settings` completed as vllm-neuron completes its server's flags. `sampling_given`: where to sample stays as it is."""
    if settings.pa_num_blocks is not None:
        raise SmolLM3Error(
            f"pa_num_blocks is {settings.pa_num_blocks}: leave it out, vllm-neuron takes enough for full lines"
        )
    return replace(
        settings,
        ctx_batch_size=1,
        is_continuous_batching=settings.batch_size > 1,
        enable_bucketing=True,
        on_device_sampling_config=settings.on_device_sampling_config if sampling_given else ON_DEVICE,
    )


def override(settings: Settings) -> dict[str, Any]:
    """`override_neuron_config` of a server that needs these settings: where they differ from its defaults."""
    defaults = Settings(settings.tp_degree, settings.batch_size, settings.seq_len, max_context_length=settings.seq_len)
    defaults = asdict(settings_of_server(defaults))
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in FLAGS.keys() | BLOCKS and value != defaults[name]
    }


def serve_command(artifact: Artifact) -> str:
    """The command that serves the artifact."""
    settings, folder = artifact.settings, artifact.path.resolve()
    words = ["vllm", "serve", artifact.manifest["model"]["folder"]]
    for name, flag in FLAGS.items():
        words += [flag, str(getattr(settings, name))]
    words += ["--max-num-batched-tokens", str(settings.seq_len), "--no-enable-chunked-prefill"]
    if settings.is_prefix_caching:
        words += ["--enable-prefix-caching", "--block-size", str(settings.pa_block_size)]
    else:
        words.append("--no-enable-prefix-caching")
    if needed := override(settings):
        words += ["--additional-config", json.dumps({"override_neuron_config": needed})]
    if (folder / VLLM_TEMPLATE).is_file():
        words += ["--chat-template", str(folder / VLLM_TEMPLATE), "--reasoning-parser", "qwen3"]
        words += ["--tool-parser-plugin", str(Path(__file__).with_name("tool_parser.py"))]
        words += ["--enable-auto-tool-choice", "--tool-call-parser", "smollm3"]
    return f"{FOLDER}={shlex.quote(str(folder))} {shlex.join(words)}"


def check_folder(config: Any) -> None:
    """SmolLM3Error where NEURON_COMPILED_ARTIFACTS is not what a server with this config would compile.

    Else the server would run what the folder says, whatever its flags; or, where a file is missing, compile over it. A
    folder without neuron_config.json is nothing yet: the server compiles into it.
    """
    folder = Path(os.environ.get(FOLDER, ""))
    if not os.environ.get(FOLDER) or not (folder / "neuron_config.json").is_file():
        return
    if (folder / MANIFEST).is_file():
        open_artifact(folder, "neuron")
    try:
        there = json.loads((folder / "neuron_config.json").read_text(encoding="utf-8"))
        neuron_there = there["neuron_config"]
    except (ValueError, KeyError, TypeError) as error:
        raise SmolLM3Error(f"{folder / 'neuron_config.json'}: damaged ({error!r}); compile again") from None
    wanted = json.loads(config.to_json_string())
    for field in fields(Settings):
        made, asked = neuron_there.get(field.name), wanted["neuron_config"].get(field.name)
        is_read = (
            field.name not in BLOCKS or config.neuron_config.is_prefix_caching or neuron_there.get("is_prefix_caching")
        )
        if made != asked and is_read:
            flag = FLAGS.get(field.name, "override_neuron_config")
            raise SmolLM3Error(
                f"{FOLDER}={folder} was made with {field.name} {made!r}, the server asks for {asked!r}: change {flag}, or "
                "compile for it"
            )
    for name in (*REQUIRED, "no_rope_layers", "rope_theta", "rope_scaling", "tie_word_embeddings"):
        if there.get(name) != wanted.get(name):
            raise SmolLM3Error(
                f"{FOLDER}={folder} was made for a checkpoint with {name} {there.get(name)!r}, the one to be served has "
                f"{wanted.get(name)!r}: serve that checkpoint, or compile this one"
            )
