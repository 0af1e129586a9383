# SPDX-License-Identifier: Apache-2.0
"""A batch on a Ray cluster: Ray Data hands rows to vLLM engines, one for each group of NeuronCores."""

import dataclasses
import logging
import os
import pickle
import re
from collections.abc import Iterable, Iterator
from typing import Any

import ray.data
import ray.exceptions

from ..artifact.folder import Artifact
from ..batch.requests import Answer, Request
from ..errors import SmolLM3Error
from .ray_cluster import NEURON_CORES, groups_of_cores, set_meeting_place
from .serving import FOLDER, engine_arguments

PER_SLOT = 8  # rows that an engine is handed at once, for each of its slots
VLLM_HAS = ("repetition_penalty", "min_p", "stop_strings")  # of Sampling's further fields


class Engine:
    """vLLM in a process that holds the cores; Ray starts it again where it was killed, and gives it its rows again."""

    def __init__(self, arguments: dict[str, Any], folder: str):
        set_meeting_place()
        os.environ[FOLDER] = folder
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine ends with this process
        from vllm import LLM, EngineArgs

        known = {field.name for field in dataclasses.fields(EngineArgs)}
        self.llm = LLM(**{name: value for name, value in arguments.items() if name in known})

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[bytes]]:
        from vllm import TokensPrompt

        requests: list[Request] = [pickle.loads(request) for request in batch["request"]]
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=request.prompt) for request in requests],
            [sampling_params(request) for request in requests],
            use_tqdm=False,
        )
        answers = [
            Answer(request, made.text, len(made.token_ids), made.finish_reason == "stop")
            for request, made in zip(requests, (output.outputs[0] for output in outputs))
        ]
        return {"answer": [pickle.dumps(answer) for answer in answers]}


def sampling_params(request: Request):
    """Returns vLLM's SamplingParams for a request. Raises SmolLM3Error for what vLLM has no field for."""
    from vllm import SamplingParams

    sampling = request.sampling
    for name in sampling.further:
        if name not in VLLM_HAS:
            raise SmolLM3Error(f"generation config: {name} is nothing that vLLM does; use --engine local")
    further = dict(sampling.further)
    if "stop_strings" in further:
        further["stop"] = further.pop("stop_strings")
    if sampling.temperature:
        further |= dict(top_k=sampling.top_k or 0, top_p=sampling.top_p or 1.0, seed=sampling.seed)
    return SamplingParams(temperature=sampling.temperature, max_tokens=request.max_new_tokens, **further)


def answer_on_ray(artifact: Artifact, requests: Iterable[Request], replicas: int | None) -> Iterator[list[Answer]]:
    """Yields answers as they come, in any order, from `replicas` engines (None: one for each group of cores).

    `ray_cluster.connect` must have been called. Raises SmolLM3Error where the cluster has too few cores.
    """
    settings = artifact.settings
    engines = groups_of_cores(settings.tp_degree, replicas)
    items = [{"request": pickle.dumps(request)} for request in requests]
    if not items:
        return
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # it would print each error with all of its frames
    size = PER_SLOT * settings.batch_size
    answered = ray.data.from_items(items, override_num_blocks=-(-len(items) // size)).map_batches(
        Engine,
        fn_constructor_args=(engine_arguments(artifact), str(artifact.path.resolve())),
        batch_size=size,
        concurrency=engines,
        num_cpus=1,
        resources={NEURON_CORES: settings.tp_degree},
    )
    try:
        for batch in answered.iter_batches(batch_size=None, prefetch_batches=0):
            yield [pickle.loads(answer) for answer in batch["answer"]]
    except ray.exceptions.RayError as error:  # it quotes what an engine's process raised
        if found := re.findall(r"SmolLM3Error: (.*)", str(error)):
            raise SmolLM3Error(found[-1]) from None
        raise
