"""An artifact as scripts/compile.py makes it on a device, but for the graphs: python make_artifact.py JOB.json

JOB.json: {"checkpoint", "settings": Settings' keywords, "output", "out"}. OUT gets the command that serves the
artifact, as a list of its words.
"""

import json
import shlex
import sys
from pathlib import Path

import neuron_on_cpu


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    neuron_on_cpu.platform()
    from smollm3_neuron.artifact.build import compile_artifact
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.vllm.serving import serve_command, settings_of_server

    settings = settings_of_server(Settings(**job["settings"]), sampling_given=True)
    artifact = compile_artifact(Path(job["checkpoint"]), Path(job["output"]), settings, "neuron")
    Path(job["out"]).write_text(json.dumps(shlex.split(serve_command(artifact))))


if __name__ == "__main__":
    main(sys.argv[1])
