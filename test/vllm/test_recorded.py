"""What test_vllm_serving.py takes for granted in the ordinary suite is what real vllm-neuron does."""

import json
from pathlib import Path

import pytest
from places import TINY
from serving import environment, run

pytestmark = pytest.mark.vllm
RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())


@pytest.mark.parametrize("sampling, override", [("on-device", {}), ("host", {"on_device_sampling_config": None})])
def test_look_up_keywords_and_hash(release, vllm_neuron, tmp_path, sampling, override):
    engine = {**RECORDED["flags"], "model": str(TINY), "additional_config": {"override_neuron_config": override}}
    real = run("look_up.py", {"engine": engine}, tmp_path, environment(release, vllm_neuron, tmp_path))
    assert real["imported_before"] == []
    assert (real["model"], real["keywords"]) == (RECORDED["model"], RECORDED["keywords"])
    assert real["md5"] == RECORDED["md5"][release.version][sampling]


@pytest.mark.parametrize(
    "override, line",
    [
        ({"fuse_qkv": True}, "NeuronConfig has no 'fuse_qkv' in the installed NxD Inference, only 'fused_qkv'"),
        ({"mlp_kernel_fuse_residual_add": True}, "mlp_kernel_fuse_residual_add is True, but"),
    ],
)
def test_an_override_that_would_be_dropped_or_run_wrong_is_said(release, vllm_neuron, tmp_path, override, line):
    engine = {**RECORDED["flags"], "model": str(TINY), "additional_config": {"override_neuron_config": override}}
    with pytest.raises(RuntimeError, match=line):
        run("look_up.py", {"engine": engine}, tmp_path, environment(release, vllm_neuron, tmp_path))
