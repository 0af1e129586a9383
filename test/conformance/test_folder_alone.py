"""The model's folder, and the part of it that goes upstream, as a contrib folder is used: nothing of ours installed.

On the library's sources in a checkout of NxDI; the part also on the CPU runtime, which stands for the library.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from places import CONTRIB, MODEL, ROOT

# what is installed of this project is taken away again, and the closed modules are stood in for
UNINSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "smollm3_neuron" not in getattr(f, "__module__", "")]
"""
SITE = f"""
{UNINSTALLED}
sys.path.insert(0, {str(CONTRIB)!r})
from nxd_sources import closed_sdk
del sys.path[0]
closed_sdk.install()
"""


def write_part(folder):
    subprocess.run([sys.executable, ROOT / "tools" / "upstream.py", folder], check=True)


def write_all(folder):
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("__pycache__"))


PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")


@pytest.fixture(scope="module", params=[write_all, write_part], ids=["the whole folder", "the upstream part"])
def folder(request, nxd_releases, tmp_path_factory):
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC, the sources of the real library")
    checkout = tmp_path_factory.mktemp("checkout")
    (checkout / "sitecustomize.py").write_text(SITE)
    request.param(checkout / "contrib/models/SmolLM3-3B")
    return checkout / "contrib/models/SmolLM3-3B"


def run_in(folder, *command, **environment):
    """Exit code and output of a Python command in the model's folder; sitecustomize.py is in the checkout's root."""
    environment = {**os.environ, **environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder.parents[2]), environment["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=500
    )
    return done.returncode, done.stdout + done.stderr


def run(folder, release, *command):
    return run_in(folder, *command, PYTHONPATH=os.pathsep.join([release.nxd, release.nxdi]), NXD_CPU_MODE="1")


def test_the_upstream_part_on_the_cpu_runtime(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(UNINSTALLED)
    folder = tmp_path / "contrib/models/SmolLM3-3B"
    write_part(folder)
    code, said = run_in(folder, *PYTEST, "test/integration", PYTHONPATH=str(CONTRIB / "nxd_cpu"))
    assert code == 0 and re.search(r"\d passed", said) and "skipped" not in said, said[-4000:]


def test_nothing_of_ours_is_there(folder, nxd_releases):
    code, said = run(folder, nxd_releases[0], "-c", "import importlib.util as u; print(u.find_spec('smollm3_neuron'))")
    assert (code, said.strip()) == (0, "None")


def test_its_tests_pass(folder, nxd_releases):
    code, said = run(folder, nxd_releases[0], *PYTEST, "test")
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
