"""Memory and time of sharding a checkpoint with the shape of SmolLM3-3B: python tools/bench_sharding.py

Makes the checkpoint itself (random, 6.15 GB, in a temporary folder that it removes), copies it, shards it, and, given
the sources of NxD Inference, shards it with the library's own sharder too: same run, same disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))

import common

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import read_config
from smollm3_neuron.model.smollm3_3b import SMOLLM3_3B


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 8], help="default: 2 8")
    parser.add_argument("--layers", type=int, default=36, help="fewer make a smaller checkpoint (default: %(default)s)")
    parser.add_argument(
        "--nxd-source", metavar="NXD_SRC:NXDI_SRC", help="the two `src` folders of the library's sources"
    )
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made (default: the system's)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # one measurement, in a process of its own
    return parser.parse_args()


class Anonymous(threading.Thread):
    """The process's anonymous memory (what no file backs), sampled: its peak over what it was when `with` began."""

    def now(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise OSError("/proc/self/status has no RssAnon")

    def run(self) -> None:
        while not self.done.wait(0.005):
            self.peak = max(self.peak, self.now())

    def __enter__(self) -> "Anonymous":
        self.done = threading.Event()
        self.first = self.peak = self.now()
        self.start()
        return self

    def __exit__(self, *exception) -> None:
        self.done.set()
        self.join()


def measure(sharder: str, folder: str, output: str) -> None:
    """Runs one sharder in this process; prints seconds, memory and the digest of what it wrote as JSON."""
    tp_degree = int(sharder.split()[1])
    if sharder.startswith("library"):
        sys.path.insert(0, str(ROOT / "contrib"))
        from nxd_sources import closed_sdk

        closed_sdk.install()
        os.environ["NXD_CPU_MODE"] = "0"
        sys.path[:0] = os.environ["NXD_SOURCE"].split(":")
    else:
        from smollm3_neuron.machine.runtime import ensure_neuronx

        ensure_neuronx()
    from smollm3_neuron.artifact.build import build_config
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM
    from smollm3_neuron.weights.shard_writer import write_shards

    config = build_config(Path(folder), Settings(tp_degree=tp_degree).checked(read_config(folder)))
    with Anonymous() as memory:
        began = time.perf_counter()
        if sharder.startswith("library"):
            config.neuron_config.skip_sharding = False
            NeuronSmolLM3ForCausalLM(folder, config).get_builder(False).shard_checkpoint(serialize_path=output)
        else:
            write_shards(folder, config.checkpoint_config, config.neuron_config, output)
        seconds = time.perf_counter() - began
    print("\n" + json.dumps({"seconds": seconds, "own": memory.first, "anonymous": memory.peak - memory.first}))


def run(sharder: str, folder: Path, output: Path, nxd_source: str | None) -> dict:
    environment = {**os.environ, "NXD_SOURCE": nxd_source or ""}
    command = [sys.executable, __file__, "--measure", sharder, str(folder), str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SmolLM3Error(f"{sharder}: failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    args = parse_args()
    if args.measure:
        measure(*args.measure)
        return
    with tempfile.TemporaryDirectory(prefix="smollm3-sharding-", dir=args.folder) as scratch:
        folder, output = Path(scratch) / "checkpoint", Path(scratch) / "output"
        folder.mkdir()
        common.make_checkpoint(folder, {**SMOLLM3_3B, "num_hidden_layers": args.layers})
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"checkpoint of {size / 1e9:.2f} GB in {scratch}\n")
        print(f"{'':<24}{'seconds':>10}{'of a copy':>11}{'anonymous memory over the process at rest':>44}")
        os.sync()  # before each measurement: what others left to be written would be paid for here
        began = time.perf_counter()
        shutil.copytree(folder, output)
        copy_seconds = time.perf_counter() - began
        print(f"{'copy':<24}{copy_seconds:>10.1f}{1:>11.2f}")
        for tp_degree in args.tp:
            compare(tp_degree, folder, output, args.nxd_source, copy_seconds)


def compare(tp_degree: int, folder: Path, output: Path, nxd_source: str | None, copy_seconds: float) -> None:
    """Prints a line for this project's sharder and, with the library's sources, one for NxDI's and how both compare."""
    shards = {}
    for sharder in (f"this {tp_degree}", *([f"library {tp_degree}"] if nxd_source else [])):
        shutil.rmtree(output)
        os.sync()
        measured = run(sharder, folder, output, nxd_source)
        seconds = measured["seconds"]
        shards[sharder] = seconds, sorted(_digest(file) for file in output.glob("*.safetensors"))
        name = f"{'NxDI own' if sharder.startswith('library') else 'this project'}, TP {tp_degree}"
        memory = f"{measured['anonymous'] / 1e9:.2f} GB over {measured['own'] / 1e9:.2f} GB"
        print(f"{name:<24}{seconds:>10.1f}{seconds / copy_seconds:>11.2f}{memory:>44}", flush=True)
    if nxd_source:
        (ours, files), (theirs, expected) = shards.values()
        equal = "equal byte for byte" if files == expected else "DIFFERENT"
        print(f"{'':<24}{ours / theirs:>10.2f} of NxDI's time; the {len(files)} files are {equal}")


def _digest(file: Path) -> str:
    from smollm3_neuron.weights.digests import sha256

    return sha256(file)


if __name__ == "__main__":
    common.run(main)
