import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def pytest_generate_tests(metafunc):
    if "pair" in metafunc.fixturenames:
        import vllm_on_device

        metafunc.parametrize("pair", vllm_on_device.parameters(metafunc.config), scope="module")
