"""Serves an artifact on this machine's NeuronCores: vLLM behind Ray Serve, one OpenAI API for several groups of cores.

    python scripts/serve.py --artifact artifacts/SmolLM3-3B-vllm --replicas 16

Each replica is a vLLM server with as many cores as the artifact's tp_degree. Requests are spread over them, and a
replica that ends is started again. It runs until it is interrupted. On several machines, or to scale with the load,
use deploy/ray/serve_smollm3.yaml.
"""

import argparse
from pathlib import Path

import common

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.vllm.ray_cluster import connect, groups_of_cores


def parse_args() -> argparse.Namespace:
    parser = common.Parser(__doc__)
    served = parser.add_argument_group("what is served, and where")
    served.add_argument("--artifact", type=Path, required=True, metavar="ARTIFACT", help="of compile.py --for-vllm")
    served.add_argument("--replicas", type=int, metavar="N", help="groups of cores that serve (default: all there are)")
    served.add_argument("--host", default="127.0.0.1", help="where it listens (default: %(default)s)")
    served.add_argument("--port", type=int, default=8000, metavar="P", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.replicas is not None and args.replicas < 1:
        raise SmolLM3Error(f"--replicas is {args.replicas}, allowed is a whole number of at least 1")
    connect("serve one group of cores with the command that compile.py printed")
    from ray import serve

    from smollm3_neuron.vllm.ray_serving import application, artifact_to_serve

    artifact = artifact_to_serve(args.artifact)
    replicas = groups_of_cores(artifact.settings.tp_degree, args.replicas)
    scaling = dict(min_replicas=replicas, max_replicas=replicas)
    serve.start(http_options=dict(host=args.host, port=args.port))
    serve.run(application(artifact, scaling), blocking=True)


if __name__ == "__main__":
    common.run(main)
