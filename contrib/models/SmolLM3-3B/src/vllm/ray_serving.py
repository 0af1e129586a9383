# SPDX-License-Identifier: Apache-2.0
"""An artifact behind Ray Serve LLM: one OpenAI API, and as many replicas of the server as there are groups of cores.

`build` is the import_path of a Ray Serve config, see deploy/ray/serve_smollm3.yaml. Written against Ray 2.53, whose
vLLM is 0.13; Ray 2.54 goes with 0.16.
"""

from pathlib import Path
from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase  # its public modules have no name for it
from ray.serve import Application
from ray.serve.llm import LLMConfig, build_openai_app

from ..artifact.folder import Artifact, open_artifact
from ..errors import SmolLM3Error
from ..machine.runtime import device_place
from .ray_cluster import NEURON_CORES, groups_of_cores, set_meeting_place
from .serving import FOLDER, engine_arguments

ARGUMENTS = ("artifact", "autoscaling_config")
ROUTER = "ray.serve.llm.request_router.PrefixCacheAffinityRouter"


class Replica(CallbackBase):
    """What a replica does before its engine starts."""

    async def on_before_node_init(self) -> None:
        """Sets what must differ between replicas, and registers the parser of tool calls in the replica's process."""
        set_meeting_place()
        from . import tool_parser  # noqa: F401


def application(artifact: Artifact, autoscaling_config: dict[str, Any]) -> Application:
    """Returns what Ray Serve runs for an artifact; `autoscaling_config` has Ray Serve's own fields."""
    return build_openai_app(dict(llm_configs=[_llm_config(artifact, autoscaling_config)]))


def _llm_config(artifact: Artifact, autoscaling_config: dict[str, Any]) -> LLMConfig:
    settings, arguments = artifact.settings, engine_arguments(artifact)
    source = arguments.pop("model")
    arguments.pop("tool_parser_plugin", None)  # only vLLM's own server reads it; Replica registers the parser
    deployment = dict(
        # the replica itself holds the cores, not a worker: vllm-neuron runs all of them from one process
        ray_actor_options=dict(num_cpus=1, resources={NEURON_CORES: settings.tp_degree}),
        autoscaling_config=dict(target_ongoing_requests=settings.batch_size, **autoscaling_config),
    )
    if settings.is_prefix_caching:
        deployment["request_router_config"] = dict(request_router_class=ROUTER)
    return LLMConfig(
        model_loading_config=dict(model_id=Path(artifact.manifest["model"]["name"]).name, model_source=source),
        engine_kwargs=arguments,
        placement_group_config=dict(bundles=[dict(CPU=0, GPU=0)]),
        deployment_config=deployment,
        runtime_env=dict(env_vars={FOLDER: str(artifact.path.resolve())}),
        callback_config=dict(callback_class=Replica),
        log_engine_metrics=False,
    )


def artifact_to_serve(folder: Path) -> Artifact:
    """Returns the artifact in `folder`. Raises SmolLM3Error where it is none that Ray Serve LLM can run."""
    artifact = open_artifact(folder, device_place())
    tp_degree = artifact.settings.tp_degree
    if tp_degree < 2:
        raise SmolLM3Error(
            f"{folder}: tp_degree is {tp_degree}, behind Ray Serve it is to be at least 2: for one core Ray Serve LLM "
            "takes an executor that vllm-neuron does not know; compile with --tp 2"
        )
    return artifact


def build(args: dict[str, Any]) -> Application:
    """Returns the application. `args` are those of the Ray Serve config: `artifact`, a folder that every node has, and
    `autoscaling_config`, Ray Serve's own, by default from 1 to as many replicas as the cluster has groups of cores.

    Raises SmolLM3Error for other arguments, an artifact that cannot be served, and a cluster without cores for it.
    """
    if unknown := args.keys() - set(ARGUMENTS):
        raise SmolLM3Error(f"args has {min(unknown)!r}, allowed are {' and '.join(ARGUMENTS)}")
    if "artifact" not in args:
        raise SmolLM3Error("args has no artifact: name the folder that scripts/compile.py --for-vllm made")
    artifact = artifact_to_serve(Path(args["artifact"]))
    replicas = dict(min_replicas=1, max_replicas=groups_of_cores(artifact.settings.tp_degree))
    return application(artifact, {**replicas, **(args.get("autoscaling_config") or {})})
