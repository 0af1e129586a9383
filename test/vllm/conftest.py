import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser):
    parser.getgroup("vllm").addoption(
        "--vllm-neuron-source",
        metavar="DIR",
        help="the folder that holds vllm_neuron: 0.2.0 where vLLM 0.11 is installed, 0.4.1 where 0.13 is",
    )


def pytest_generate_tests(metafunc):
    if "release" not in metafunc.fixturenames:
        return
    import serving

    source, releases = metafunc.config.getoption("--vllm-neuron-source", None), metafunc.config.nxd_releases
    versions = getattr(metafunc.module, "VLLM", ("0.11",))
    reason = serving.missing([source] if source else [], releases, versions)
    if reason:
        metafunc.parametrize(
            "release", [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="vllm-neuron")], scope="session"
        )
    else:
        metafunc.parametrize("release", [pytest.param(r, id=r.version) for r in releases], scope="session")


@pytest.fixture(scope="session")
def vllm_neuron(request) -> str:
    return request.config.getoption("--vllm-neuron-source")
