"""The package as it is installed: what the wheel holds, what an import costs, which library it takes."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, *path: Path) -> subprocess.CompletedProcess:
    """`code` in a fresh interpreter, with these folders in front of sys.path."""
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]}\n" + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")


def test_the_wheel_holds_one_top_level_package(tmp_path):
    source = tmp_path / "source"  # a build leaves folders behind
    for name in ("contrib", "README.md", "LICENSE", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        source.mkdir(exist_ok=True)
        copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, source]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("smollm3_neuron-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"smollm3_neuron"}
    sources = {p.relative_to(ROOT / "contrib/nxd_cpu").as_posix() for p in ROOT.glob("contrib/nxd_cpu/**/*.py")}
    carried = {n.removeprefix("smollm3_neuron/nxd_cpu/") for n in names if n.startswith("smollm3_neuron/nxd_cpu/")}
    assert sources <= carried and len(sources) > 10
    source = ROOT / "contrib/models/SmolLM3-3B/src"
    own = {p.relative_to(source).as_posix() for suffix in ("py", "jinja", "json") for p in source.rglob(f"*.{suffix}")}
    assert own <= {n.removeprefix("smollm3_neuron/") for n in names}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "from smollm3_neuron.machine.runtime import ensure_neuronx\nprint(ensure_neuronx())\n"
    code += "import neuronx_distributed\nprint(neuronx_distributed.__file__)"
    done = run(code, tmp_path / "site")
    assert done.stdout.split() == ["cpu", str(tmp_path / "site/smollm3_neuron/nxd_cpu/neuronx_distributed/__init__.py")]


def test_importing_it_imports_no_torch():
    done = run(
        "import smollm3_neuron\n"
        "from smollm3_neuron.machine import locate, preflight, runtime\n"
        "from smollm3_neuron.model import config\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    assert done.stdout == "[]\n", done.stderr


def fake(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("IS = 'the SDK'")
    return folder


ENSURE = "from smollm3_neuron.machine.runtime import ensure_neuronx\nbefore = list(sys.path)\n"


def test_without_the_sdk_the_cpu_runtime_comes_last():
    done = run(ENSURE + "print(ensure_neuronx(), ensure_neuronx(), sys.path[:-1] == before, sys.path[-1])")
    assert done.stdout.split() == ["cpu", "cpu", "True", str(ROOT / "contrib/nxd_cpu")], done.stderr


def test_the_sdk_is_never_shadowed(tmp_path):
    sdk = fake(tmp_path, "neuronx_distributed", "neuronx_distributed_inference", "torch_neuronx")
    done = run(ENSURE + "print(ensure_neuronx(), sys.path == before)", sdk)
    assert done.stdout.split() == ["neuron", "True"], done.stderr


@pytest.mark.parametrize("present", [["torch_neuronx"], ["neuronx_distributed", "torch_neuronx"]])
def test_half_an_sdk_is_an_error(tmp_path, present):
    done = run(ENSURE + "ensure_neuronx()", fake(tmp_path, *present))
    assert "a part of the Neuron SDK is installed" in done.stderr and done.returncode == 1
