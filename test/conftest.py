import os
import sys
import tempfile
from pathlib import Path

import pytest

# before the first import of torch: a second thread slows models as small as the tests' many times over
os.environ.setdefault("OMP_NUM_THREADS", "1")

# the key that signs compiled graphs is kept there: not in the configuration of whoever runs the tests
_configuration = tempfile.TemporaryDirectory()
os.environ["XDG_CONFIG_HOME"] = _configuration.name
os.environ["NXD_CPU_CACHE"] = str(Path(_configuration.name, "nxd_cpu"))  # nor compiled parts in that user's cache

TEST = Path(__file__).parent
ROOT = TEST.parent
sys.path[:0] = [str(TEST), str(TEST / "conformance"), str(ROOT / "contrib"), str(ROOT / "tools")]

from nxd_sources.release import Release


def pytest_addoption(parser):
    group = parser.getgroup("conformance")
    group.addoption(
        "--nxd-source",
        action="append",
        default=[],
        metavar="NXD_SRC:NXDI_SRC",
        help="the `src` folders of the NxD and NxDI sources of one release: compare with the real library (repeatable)",
    )
    group.addoption(
        "--record", action="store_true", help="rewrite test/conformance/recorded from the first --nxd-source"
    )


def pytest_configure(config):
    try:
        releases = [Release.find(source) for source in config.getoption("--nxd-source")]
    except ValueError as error:
        raise pytest.UsageError(f"--nxd-source: {error}") from None
    if config.getoption("--record") and not releases:
        raise pytest.UsageError("--record needs a --nxd-source to record from")
    config.nxd_releases = releases


@pytest.fixture(scope="session")
def nxd_releases(request) -> list[Release]:
    return request.config.nxd_releases


@pytest.fixture(scope="session")
def record(request) -> bool:
    return request.config.getoption("--record")


@pytest.fixture(scope="session")
def random_checkpoints(tmp_path_factory) -> dict[str, str]:
    """Folders of small random checkpoints by name, see reference.py."""
    from reference import RANDOM, make_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(folder / name, **changes) for name, changes in RANDOM.items()}
