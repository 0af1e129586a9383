"""The plugin, in fresh processes over a small stand-in for NxD Inference's table; vLLM itself is not installed here."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REGISTER = "from smollm3_neuron.vllm.plugin import register; register(); register()\n"
TABLE = "neuronx_distributed_inference.utils.constants"


def run(code: str, *path: Path) -> subprocess.CompletedProcess:
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]}\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")


def test_it_is_an_entry_point():
    (entry,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "smollm3"]
    assert entry.value == "smollm3_neuron.vllm.plugin:register"


def test_registering_imports_next_to_nothing():
    """vLLM registers its plugins in every process it starts, also where another model is served."""
    done = run(f"before = set(sys.modules)\n{REGISTER}print(*(set(sys.modules) - before))")
    assert done.stderr == ""
    others = [name for name in done.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names]
    own = {f"smollm3_neuron{name}" for name in ("", ".errors", ".vllm", ".vllm.plugin")}
    assert set(others) == own


def test_without_nxd_inference_nothing_happens():
    done = run(REGISTER + f"import {TABLE}")
    assert "ModuleNotFoundError: No module named 'neuronx_distributed_inference'" in done.stderr


CPU = f"sys.path.append({str(ROOT / 'contrib/nxd_cpu')!r})\n"
SHOW = (
    f"from {TABLE} import MODEL_TYPES; "
    "print({k: {t: c.__name__ for t, c in v.items()} for k, v in MODEL_TYPES.items()})"
)
FOUND = "{'smollm3': {'causal-lm': 'NeuronSmolLM3ForCausalLM'}}\n"


@pytest.mark.parametrize(
    "code",
    [
        CPU + REGISTER + SHOW,
        CPU + f"import {TABLE}\n" + REGISTER + SHOW,
        CPU + REGISTER + f"import neuronx_distributed_inference.models.config, {TABLE}\n" + REGISTER + SHOW,
    ],
    ids=["before", "after", "both"],
)
def test_the_model_is_in_the_table(code):
    done = run(code)
    assert done.stdout == FOUND, done.stderr[-2000:]


def test_a_release_that_is_not_supported_is_said(tmp_path):
    (tmp_path / "neuronx_distributed_inference-0.12.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: neuronx-distributed-inference\nVersion: 0.12.1\n"
    (tmp_path / "neuronx_distributed_inference-0.12.1.dist-info/METADATA").write_text(metadata)
    done = run(CPU + REGISTER + SHOW, tmp_path)
    assert done.stdout == "{}\n"
    assert "SmolLM3 is not registered: NxD Inference 0.12.1 is installed, supported are 0.7, 0.8, 0.9" in done.stderr
