# SPDX-License-Identifier: Apache-2.0
"""Groups of NeuronCores in a Ray cluster, as Ray counts them. Importing it needs no Ray."""

import importlib.util
import os
import socket

from ..errors import SmolLM3Error

NEURON_CORES = "neuron_cores"  # Ray's name for the resource; who holds some gets NEURON_RT_VISIBLE_CORES from it
MEETING_PLACE = "NEURON_RT_ROOT_COMM_ID"  # host:port at which the cores of one group find each other


def connect(instead: str) -> None:
    """Connects to the cluster that the environment variable RAY_ADDRESS names, or to one that Ray starts here.

    Raises SmolLM3Error where Ray is not installed; `instead` is what to do without it.
    """
    if importlib.util.find_spec("ray") is None:
        raise SmolLM3Error(f"Ray is not installed: pip install -e '.[ray]' in the checkout, or {instead}")
    import ray

    ray.init(ignore_reinit_error=True, log_to_driver=False)


def groups_of_cores(tp_degree: int, wanted: int | None = None) -> int:
    """Returns `wanted`, or how many groups of `tp_degree` cores the nodes of the cluster have, in use or not.

    Raises SmolLM3Error where there are not so many, or none.
    """
    import ray

    cores = [int(node["Resources"].get(NEURON_CORES, 0)) for node in ray.nodes() if node["Alive"]]
    groups = sum(count // tp_degree for count in cores)
    if not 1 <= (wanted or 1) <= groups:
        raise SmolLM3Error(
            f"{wanted or 1} groups of {tp_degree} {NEURON_CORES} are asked for, the Ray cluster has {groups} (nodes "
            f"with {', '.join(map(str, cores))} cores): ask for no more, or add a machine"
        )
    return wanted or groups


def set_meeting_place() -> None:
    """Gives this process and its children a port of their own: two groups on one machine must not share one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ[MEETING_PLACE] = f"127.0.0.1:{free.getsockname()[1]}"
