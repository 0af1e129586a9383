"""vllm-neuron without a device: vLLM, vllm-neuron and NxD Inference are real, the device alone is stood in for.

`platform` is the entry point in `vllm.platform_plugins` in the place of vllm-neuron's own, which looks for
/dev/neuron*. The library's `compile` writes the config alone, and its `load` starts a process per rank that runs the
library's CPU mode.
"""

import importlib.abc
import importlib.machinery
import pickle
import shutil
import subprocess
import sys
import tempfile
from multiprocessing import connection
from pathlib import Path

APPLICATION = "neuronx_distributed_inference.models.application_base"


def platform() -> str:
    from nxd_sources import closed_sdk

    if APPLICATION not in sys.modules and not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        closed_sdk.install()
        sys.meta_path.insert(0, _AfterImport())
    return "vllm_neuron.platform.NeuronPlatform"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces `compile` and `load` once the library is imported, which vllm-neuron does in its own time."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != APPLICATION:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.NeuronApplicationBase.compile = _compile
            module.NeuronApplicationBase.load = _load

        spec.loader.exec_module = exec_module
        return spec


def _compile(self, compiled_model_path, *args, **kwargs):
    self.config.save(compiled_model_path)
    (Path(compiled_model_path) / "model.pt").write_text(str(self.model_path))


def _load(self, compiled_model_path, *args, **kwargs):
    graphs = Path(compiled_model_path) / "model.pt"
    if not graphs.is_file():
        raise ValueError(f"The provided filename {graphs} does not exist")  # as torch.jit.load
    ranks = _Ranks(self.config, Path(compiled_model_path), graphs.read_text())
    self.forward = ranks.forward


class _Ranks:
    """The processes of one model; they end when this one does."""

    def __init__(self, config, compiled: Path, checkpoint: str):
        folder = tempfile.mkdtemp()
        config.save(folder)
        with connection.Listener(f"{folder}/socket", "AF_UNIX") as listener:
            self.ranks = []
            for rank in range(config.neuron_config.tp_degree):
                subprocess.Popen([sys.executable, "-m", "neuron_on_cpu.rank", folder, compiled, checkpoint, str(rank)])
                self.ranks.append(listener.accept())
        self._answers()
        shutil.rmtree(folder)

    def forward(self, *args, **kwargs):
        for rank in self.ranks:
            rank.send_bytes(pickle.dumps((args, kwargs)))  # by value: `send` would share the tensors' memory
        return self._answers()

    def _answers(self):
        """Rank 0's, when all have answered."""
        answers, waiting = {}, list(self.ranks)
        while waiting:
            for rank in connection.wait(waiting):
                answers[rank] = pickle.loads(rank.recv_bytes())
                waiting.remove(rank)
                if isinstance(answers[rank], Exception):
                    raise answers[rank]
        return answers[self.ranks[0]]
