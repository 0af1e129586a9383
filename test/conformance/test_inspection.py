"""inspect_layers.py on the real library's sources: it finds the layer whose flag differs from transformers'."""

import json
import shutil
import subprocess
import sys

import pytest
from places import ROOT, TINY


@pytest.fixture(scope="module")
def flipped(nxd_releases, tmp_path_factory):
    """An artifact of `tiny` whose layer 2 applies no RoPE, and the folder that it was made of."""
    if not nxd_releases:
        pytest.skip("needs --nxd-source NXD_SRC:NXDI_SRC, the sources of the real library")
    from smollm3_neuron.artifact.build import compile_artifact
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.machine.runtime import ensure_neuronx

    ensure_neuronx()
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("flipped") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    config["no_rope_layers"][2] = 0
    (folder / "config.json").write_text(json.dumps(config))
    settings = Settings(tp_degree=1, seq_len=32, torch_dtype="float32")
    return compile_artifact(folder, folder.parent / "artifact", settings, "cpu").path, folder


def test_the_layer_is_found(flipped, nxd_releases):
    artifact, folder = flipped
    for release in nxd_releases:
        command = [
            sys.executable,
            ROOT / "scripts/inspect_layers.py",
            artifact,
            "--nxd-source",
            f"{release.nxd}:{release.nxdi}",
        ]
        right = subprocess.run([*command, "--model", folder], capture_output=True, text=True)
        assert right.returncode == 0 and "108 values of 8 layers agree" in right.stdout, right.stdout + right.stderr
        wrong = subprocess.run([*command, "--model", TINY], capture_output=True, text=True)
        assert wrong.returncode == 1 and "first difference: layer 2, attention_queries" in wrong.stdout, (
            wrong.stdout + wrong.stderr
        )
        assert "layers [2] behave otherwise than the config says" in wrong.stdout
