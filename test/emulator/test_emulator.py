"""The device path: the library's own compile, load and forward, on an emulated Neuron device, against transformers.

Needs --nxd-source and `make emulator-venv`; asked for with -m emulator.
"""

import subprocess

import pytest
import running
from cells import Cell, cells_of
from places import TINY
from reference import make_checkpoint

from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.check.altered_reference import load_altered_reference

pytestmark = pytest.mark.emulator
SLOW = ("tiny-tp16", "tiny-tp32", "prompts-of-4096-tokens")


def pytest_generate_tests(metafunc):
    if "release" not in metafunc.fixturenames:
        return
    releases = metafunc.config.nxd_releases
    reason = running.missing() or (None if releases else "needs --nxd-source NXD_SRC:NXDI_SRC, the library's sources")
    names = ["release", "cell"] if "cell" in metafunc.fixturenames else ["release"]
    if reason:
        skipped = pytest.param(*[None] * len(names), marks=pytest.mark.skip(reason=reason), id="real-library")
        metafunc.parametrize(names, [skipped])
    elif "cell" in names:
        metafunc.parametrize(
            names,
            [
                pytest.param(
                    release, cell, id=f"{release.version}-{cell.name}", marks=[pytest.mark.slow] * (cell.name in SLOW)
                )
                for release in releases
                for cell in cells_of(release.version)
            ],
        )
    else:
        metafunc.parametrize(names, [pytest.param(release, id=release.version) for release in releases])


@pytest.fixture(scope="session")
def checkpoints(random_checkpoints, tmp_path_factory) -> dict[str, str]:
    """Folders by name."""
    longest = tmp_path_factory.mktemp("long") / "4096"
    return {**random_checkpoints, "tiny": str(TINY), "4096": make_checkpoint(longest, max_position_embeddings=8192)}


@pytest.fixture(scope="session")
def on_device(request, checkpoints, tmp_path_factory):
    """Results of (release, cell): one call of emulated.py per release for all the cells that were asked for."""
    results = {}

    def get(release, cell):
        if release not in results:
            params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            cells = dict.fromkeys(p["cell"] for p in params if p.get("release") == release and "cell" in p)
            jobs = [cell.job(checkpoints) for cell in cells]
            results[release] = running.run(release, jobs, tmp_path_factory.mktemp(f"emulated-{release.version}"))
        result = results[release][cell.name]
        assert "error" not in result, result.get("traceback", result["error"])
        return result

    return get


def test_tokens_equal_transformers(release, cell: Cell, on_device, checkpoints, tmp_path):
    result = on_device(release, cell)
    print(f"{result['seconds']}, executions {result['counts']}, graphs compiled {result['compiled']}")
    if cell.neuron.get("quantized"):
        checkpoints = {cell.checkpoint: dequantized(checkpoints[cell.checkpoint], tmp_path, cell.neuron)}
    assert result["tokens"] == cell.expected(checkpoints)
    assert tuple(result.get("cached", ())) == cell.cached
    if cell.neuron.get("async_mode"):
        assert result["counts"]["forward_async"] and "forward" not in result["counts"]


def dequantized(checkpoint, folder, neuron):
    """The checkpoint with the values that its quantized weights stand for, its head untied."""
    settings = Settings(**{name: value for name, value in neuron.items() if name in Settings.__dataclass_fields__})
    model = load_altered_reference(checkpoint, quantized=settings)
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    return str(folder)


def test_layers_are_inspected_as_far_as_the_library_goes(release, tmp_path):
    """Not in the artifact's graphs, which is said; with --nxd-source in the library's CPU mode."""

    def run(script, *args):
        command = [running.PYTHON, running.ROOT / "scripts" / script, *args]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=600, env=running.environment(release), cwd=running.ROOT
        )

    artifact = tmp_path / "artifact"
    shape = ["--model", "tiny", "--tp", "2", "--seq-len", "64", "--dtype", "float32"]
    assert run("compile.py", *shape, "--output", artifact).returncode == 0
    done = run("inspect_layers.py", artifact)
    assert done.returncode == 2 and "cannot look into a device" in done.stderr and "--nxd-source" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    done = run("inspect_layers.py", artifact, "--nxd-source", f"{release.nxd}:{release.nxdi}")
    assert done.returncode == 0 and "108 values of 8 layers agree with transformers'" in done.stdout, done.stderr
