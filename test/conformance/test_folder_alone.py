"""The model's folder alone, as a contrib folder is used: in a checkout of NxDI, with nothing of ours installed."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import CONTRIB, MODEL

# what is installed of this project is taken away again, and the closed modules are stood in for
SITE = f"""
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "smollm3_neuron" not in getattr(f, "__module__", "")]
sys.path.insert(0, {str(CONTRIB)!r})
from nxd_sources import closed_sdk
del sys.path[0]
closed_sdk.install()
"""


@pytest.fixture(scope="module")
def folder(nxd_releases, tmp_path_factory):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC, the sources of the real library")
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "sitecustomize.py").write_text(SITE)
    shutil.copytree(MODEL, checkout / "contrib/models/SmolLM3-3B", ignore=shutil.ignore_patterns("__pycache__"))
    return checkout / "contrib/models/SmolLM3-3B"


def run(folder, release, *command):
    path = os.pathsep.join([str(folder.parents[2]), release.nxd, release.nxdi])
    environment = {**os.environ, "PYTHONPATH": path, "NXD_CPU_MODE": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    return done.returncode, done.stdout + done.stderr


def test_nothing_of_ours_is_there(folder, nxd_releases):
    code, said = run(folder, nxd_releases[0], "-c", "import importlib.util as u; print(u.find_spec('smollm3_neuron'))")
    assert (code, said.strip()) == (0, "None")


def test_its_tests_pass(folder, nxd_releases):
    code, said = run(folder, nxd_releases[0], "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "test")
    assert code == 0 and re.search(r"\d{3} passed", said), said[-4000:]
    skipped = {
        re.sub(r"SKIPPED \[\d+\] |\.py(:\d+)?: .*", "", line) for line in said.splitlines() if line[:7] == "SKIPPED"
    }
    assert skipped <= {
        "test/integration/test_model",
        "test/unit/test_chat",
    }  # compiles nothing; the 3B's template is not here


def test_its_snippet_for_this_library_runs(folder, nxd_releases):
    (code,) = re.findall(
        r"<!-- run: by test_folder_alone.py -->\n```python\n(.*?)```", (folder / "README.md").read_text(), re.S
    )
    code, said = run(folder, nxd_releases[0], "-c", code)
    assert code == 0 and "The square root of 144 is 12" in said, said[-4000:]
