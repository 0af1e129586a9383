"""A release without public sources: what the model uses of it is compared with the record, before it is imported.

The stand-in for such a release is 0.9's sources under its number; needs --nxd-source with them.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from extract_api import load
from extract_interfaces import RECORD, newest, text, used
from places import CONTRIB

from smollm3_neuron.model.interfaces import _difference

PROGRAM = """
import logging, sys
logging.basicConfig(format="%(message)s")
from nxd_sources import closed_sdk
closed_sdk.install()
try:
    import smollm3_neuron.modeling_smollm3_3b
    print("loaded")
except ValueError as error:
    print(error)
"""


def test_the_record_is_of_the_newest_release():
    assert newest(["0.10.0", "0.9.0"]) == "0.10.0"
    record = used(newest(load()))
    assert record["release"] == "0.9.0" and len(record["names"]) > 30
    assert RECORD.read_text() == text(record), "run tools/extract_interfaces.py"


@pytest.fixture(scope="module")
def stand_in(nxd_releases, tmp_path_factory):
    """A function: runs PROGRAM on 0.9's sources, changed, under the number of another release."""
    found = [release for release in nxd_releases if release.version.startswith("0.9")]
    if not found:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC of NxD Inference 0.9")
    (release,) = found

    def run(version, file=None, old=None, new=None, program=PROGRAM):
        folder = tmp_path_factory.mktemp("stand-in")
        shutil.copytree(release.nxdi, folder / "nxdi")
        info = folder / "nxdi" / f"neuronx_distributed_inference-{version}.dist-info"
        info.mkdir()
        name = "Metadata-Version: 2.1\nName: neuronx-distributed-inference\n"
        (info / "METADATA").write_text(f"{name}Version: {version}\n")
        if file:
            path = folder / "nxdi/neuronx_distributed_inference" / file
            assert path.read_text().count(old) >= 1
            path.write_text(path.read_text().replace(old, new))
        paths = [str(CONTRIB), str(folder / "nxdi"), str(release.nxd)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)

    return run


def test_with_the_same_interfaces_it_loads_and_that_is_said_once(stand_in):
    done = stand_in("0.10.18399")
    assert done.stdout == "loaded\n", done.stderr
    assert done.stderr.count("checked against its interfaces only, which are those of 0.9.0") == 1


ATTENTION = "modules/attention/attention_base.py"


@pytest.mark.parametrize(
    "file, old, new, named",
    [
        (ATTENTION, "past_key_value, active_mask) -> Tensor:", "past_key_value, active_mask, sinks) -> Tensor:",
         "NeuronAttentionBase.perform_prefix_prefill takes sinks, too"),
        (ATTENTION, "def perform_prefix_prefill(self, Q, K,", "def perform_prefix_prefill(self, K, Q,",
         "perform_prefix_prefill takes self, K, Q, V, q_len, bsz, attention_mask, past_key_value, active_mask in"),
        ("modules/kvcache/kv_cache_manager.py", "layer_to_cache_size_mapping", "cache_sizes",
         "KVCacheManager.__init__ takes no layer_to_cache_size_mapping"),
        ("models/llama/modeling_llama.py", "class NeuronLlamaMLP(", "class LlamaMLP(",
         "neuronx_distributed_inference.models.llama.modeling_llama has no NeuronLlamaMLP"),
    ],
)  # fmt: skip
def test_a_difference_is_named(file, old, new, named, stand_in):
    done = stand_in("0.10.18399", file, old, new)
    assert done.stdout.startswith("NxD Inference 0.10.18399 is installed, and ") and named in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1 and "use SDK 2.28" in done.stdout


def test_a_difference_that_does_not_matter(stand_in):
    done = stand_in("0.10.18399", ATTENTION, "sliding_window: int = None", "sliding_window: int = None, brand_new=0")
    assert done.stdout == "loaded\n", done.stdout + done.stderr


def test_through_vllm_it_is_not_registered(stand_in):
    program = PROGRAM.split("try:")[0] + (
        "from smollm3_neuron.vllm.plugin import register; register()\n"
        "from neuronx_distributed_inference.utils.constants import MODEL_TYPES; print('smollm3' in MODEL_TYPES)"
    )
    assert stand_in("0.10.18399", program=program).stdout == "True\n"
    done = stand_in("0.11.1", program=program)
    assert done.stdout == "False\n" and "NxD Inference 0.11.1 is installed, supported are" in done.stderr
    changed = ATTENTION, "past_key_value, active_mask) -> Tensor:", "past_key_value, active_mask, sinks) -> Tensor:"
    done = stand_in("0.10.18399", *changed, program=program)
    assert done.stdout == "False\n" and "SmolLM3 is not registered: NxD Inference 0.10.18399" in done.stderr


@pytest.mark.parametrize(
    "name, use, expected",
    [
        ("json:loads", None, None),
        ("json:no_such", None, "json has no no_such"),
        ("no_such_module:name", None, "no_such_module has no name"),
        ("json:dumps", {"given": ["indent"]}, None),
        ("json:detect_encoding", {"given": ["indent"]}, "detect_encoding takes no indent"),
        ("json:detect_encoding", {"given": [], "overridden": ["b"], "open": False}, None),
        ("json:JSONEncoder.encode", {"given": [], "overridden": ["self"], "open": False},
         "JSONEncoder.encode takes o, too"),
        ("json:JSONEncoder.encode", {"given": [], "overridden": ["self"], "open": True}, None),
    ],
)  # fmt: skip
def test_differences(name, use, expected):
    assert _difference(name, json.loads(json.dumps(use))) == expected
