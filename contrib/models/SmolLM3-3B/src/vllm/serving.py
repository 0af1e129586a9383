# SPDX-License-Identifier: Apache-2.0
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
from ..machine.runtime import device_place
from ..model.config import REQUIRED
from ..model.json_files import read_json

FOLDER = "NEURON_COMPILED_ARTIFACTS"
ON_DEVICE = {"dynamic": True, "deterministic": False}
FLAGS = {
    "tp_degree": "--tensor-parallel-size",
    "batch_size": "--max-num-seqs",
    "seq_len": "--max-model-len",
    "torch_dtype": "--dtype",
}
SPECULATION = {"speculation_length", "enable_fused_speculation"}  # of --speculative-config
BLOCKS = {"is_prefix_caching", "pa_block_size", "pa_num_blocks"}  # flags of the server's own, see serve_command


def settings_of_server(settings: Settings, sampling_given: bool = False) -> Settings:
    """Returns `settings` completed as vllm-neuron completes its server's flags.

    With `sampling_given`, or a draft, on_device_sampling_config stays as it is. Raises SmolLM3Error where pa_num_blocks
    is given, and speculation_length without a draft, whose graph a server would never run.
    """
    if settings.pa_num_blocks is not None:
        raise SmolLM3Error(
            f"pa_num_blocks is {settings.pa_num_blocks}: leave it out, vllm-neuron takes enough for full lines"
        )
    if settings.speculation_length and not settings.enable_fused_speculation:
        raise SmolLM3Error(
            f"speculation_length is {settings.speculation_length}: leave it out, vllm-neuron looks no candidates up"
        )
    keeps_sampling = sampling_given or settings.enable_fused_speculation
    return replace(
        settings,
        ctx_batch_size=1,
        is_continuous_batching=settings.batch_size > 1,
        enable_bucketing=True,
        on_device_sampling_config=settings.on_device_sampling_config if keeps_sampling else ON_DEVICE,
    )


def override(settings: Settings) -> dict[str, Any]:
    """Returns a server's `override_neuron_config` for these settings: where they differ from its defaults."""
    flags = Settings(settings.tp_degree, settings.batch_size, settings.seq_len, max_context_length=settings.seq_len)
    defaults = asdict(settings_of_server(flags))
    return {
        name: value
        for name, value in asdict(settings).items()
        if name not in FLAGS.keys() | BLOCKS | SPECULATION and value != defaults[name]
    }


def engine_arguments(artifact: Artifact) -> dict[str, Any]:
    """Returns vLLM's arguments for an artifact, by the names of its EngineArgs and of its server's FrontendArgs."""
    settings, folder = artifact.settings, artifact.path.resolve()
    arguments = {"model": artifact.manifest["model"]["folder"]}
    arguments |= {_argument(flag): getattr(settings, name) for name, flag in FLAGS.items()}
    arguments |= dict(
        max_num_batched_tokens=settings.seq_len,
        enable_chunked_prefill=False,
        enable_prefix_caching=settings.is_prefix_caching,
    )
    if settings.is_prefix_caching:
        arguments["block_size"] = settings.pa_block_size
    if settings.enable_fused_speculation:
        arguments["speculative_config"] = {
            "model": artifact.manifest["model"]["draft"]["folder"],
            "num_speculative_tokens": settings.speculation_length,
            "method": "draft_model",
        }
    if overridden := override(settings):
        arguments["additional_config"] = {"override_neuron_config": overridden}
    if (folder / VLLM_TEMPLATE).is_file():
        arguments |= dict(
            chat_template=str(folder / VLLM_TEMPLATE),
            reasoning_parser="qwen3",
            tool_parser_plugin=str(Path(__file__).with_name("tool_parser.py")),
            enable_auto_tool_choice=True,
            tool_call_parser="smollm3",
        )
    return arguments


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def serve_command(artifact: Artifact) -> str:
    """Returns the command line that serves the artifact."""
    arguments = engine_arguments(artifact)
    words = ["vllm", "serve", arguments.pop("model")]
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return f"{FOLDER}={shlex.quote(str(artifact.path.resolve()))} {shlex.join(words)}"


def _in_order(value: Any) -> Any:
    """Returns a field's value, target_modules of a `lora_config` sorted: the library lists them in any order."""
    if isinstance(value, dict) and isinstance(value.get("target_modules"), list):
        return {**value, "target_modules": sorted(value["target_modules"])}
    return value


def check_folder(config: Any) -> None:
    """Raises SmolLM3Error where NEURON_COMPILED_ARTIFACTS is not what a server with this config would compile.

    `config` is a SmolLM3InferenceConfig. Unchecked, the server would run what the folder says, whatever its flags; or,
    where a file is missing, compile over it. A folder without neuron_config.json is nothing yet: the server compiles
    into it.
    """
    folder = Path(os.environ.get(FOLDER, ""))
    if not os.environ.get(FOLDER) or not (folder / "neuron_config.json").is_file():
        return
    if (folder / MANIFEST).is_file():
        open_artifact(folder, device_place())
    made_for = read_json(folder / "neuron_config.json", "compile again", any_number=True)
    made_with = made_for.get("neuron_config") if isinstance(made_for, dict) else None
    if not isinstance(made_with, dict):
        raise SmolLM3Error(f"{folder / 'neuron_config.json'}: damaged, it has no neuron_config; compile again")
    asked_for = json.loads(config.to_json_string())
    if made_with.get("enable_fused_speculation") and not config.neuron_config.enable_fused_speculation:
        of_draft = (made_for.get("fused_spec_config") or {}).get("draft_config") or {}
        if all(of_draft.get(name) == asked_for.get(name) for name in REQUIRED):  # the server builds its config, too
            made_for, made_with = of_draft, of_draft["neuron_config"]
    is_prefix_caching = config.neuron_config.is_prefix_caching or made_with.get("is_prefix_caching")
    for field in fields(Settings):
        made, asked = (_in_order(of.get(field.name)) for of in (made_with, asked_for["neuron_config"]))
        if made != asked and (field.name not in BLOCKS or is_prefix_caching):
            flag = FLAGS.get(field.name, "override_neuron_config")
            flag = "--speculative-config" if field.name in SPECULATION else flag
            raise SmolLM3Error(
                f"{FOLDER}={folder} was made with {field.name} {made!r}, the server asks for {asked!r}: change {flag}, "
                "or compile for it"
            )
    for name in (*REQUIRED, "no_rope_layers", "rope_theta", "rope_scaling", "tie_word_embeddings"):
        if made_for.get(name) != asked_for.get(name):
            raise SmolLM3Error(
                f"{FOLDER}={folder} was made for a checkpoint with {name} {made_for.get(name)!r}, the one to be served "
                f"has {asked_for.get(name)!r}: serve that checkpoint, or compile this one"
            )
