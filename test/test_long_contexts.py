"""Long prompts: validate.py --length, YaRN by a flag of compile.py, and the reference's memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import run as run_command
from places import ROOT, TINY
from transformers import AutoTokenizer, SmolLM3Config

from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.model.config import read_config
from smollm3_neuron.vllm.serving import serve_command
from smollm3_neuron.weights.derived import factor_for, stretch_checkpoint


def run(script: str, *args) -> subprocess.CompletedProcess:
    return run_command(ROOT / "scripts" / f"{script}.py", *args)


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> Path:
    """`tiny`, as if it had no more than 256 positions."""
    folder = tmp_path_factory.mktemp("short") / "model"
    shutil.copytree(TINY, folder)
    (folder / "prompts.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    return folder


def test_yarn_by_a_flag_and_a_long_prompt(short, tmp_path):
    artifact, text = tmp_path / "artifact", tmp_path / "text.txt"
    shape = "--tp", 2, "--seq-len", 512, "--dtype", "float32", "--output", artifact
    done = run("compile", "--model", short, *shape)
    assert done.returncode == 2 and "from 2 to 256; compile.py --context 512 stretches" in done.stderr
    done = run("compile", "--model", short, *shape, "--context", 512)
    assert done.returncode == 0 and "YaRN, factor 2: 512 positions" in done.stdout, done.stderr

    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    assert json.loads((artifact / "neuron_config.json").read_text())["rope_scaling"] == scaling
    made = open_artifact(artifact, "cpu")
    checkpoint = Path(made.manifest["model"]["folder"])
    assert SmolLM3Config.from_pretrained(checkpoint).rope_scaling == scaling
    assert made.tokenizer().model_max_length == AutoTokenizer.from_pretrained(checkpoint).model_max_length == 512
    command = serve_command(made)  # vLLM reads the positions from the checkpoint that it is given
    assert f"vllm serve {checkpoint} " in command and "--max-model-len 512" in command

    text.write_text("The river turns mills. 3 + 4 = 7 and 5 + 6 = 11. ")
    judge = "validate", artifact, "--length", 512, "--prompt-file", text, "--max-new-tokens", 8
    done = run(*judge, "--json", tmp_path / "report.json")
    assert done.returncode == 0 and "verdict: identical" in done.stdout, done.stdout + done.stderr
    assert "the needle is 7421; of the answers the artifact's" in done.stdout
    (case,) = json.loads((tmp_path / "report.json").read_text())["cases"]
    assert case["prompt"] == "512 tokens, a needle in them" and len(case["tokens"]) == 8
    # beside the model that was not stretched the same answers are wrong
    assert run(*judge, "--model", short).returncode == 1
    for flags, named in (
        (["--length", 513], "length is 513, allowed is a whole number from"),
        (["--length", 9], "to 512, what the artifact was compiled for"),
        (["--prompt-file", text], "give --length N, too"),
    ):
        done = run("validate", artifact, *flags)
        assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--context", 256], "context is 256, and the model has 256 positions without YaRN; leave it out"),
        (["--context", 512, "--factor", 2], "leave --rope-scaling and --factor out"),
        (["--rope-scaling", "yarn"], "give both, or --context N"),
        (["--factor", 2], "give both, or --context N"),
        (["--rope-scaling", "linear", "--factor", 2], "--rope-scaling is 'linear', allowed is 'yarn'"),
        (["--rope-scaling", "yarn", "--factor", 1], "factor is 1.0, allowed is a number above 1"),
        (["--rope-scaling", "yarn", "--factor", "nan"], "factor is nan, allowed is a number above 1"),
        (["--context", 512, "--num-layers", 2], "--num-layers and YaRN"),
    ],
)
def test_what_cannot_be_stretched(flags, named, short, tmp_path):
    done = run("compile", "--model", short, *flags, "--seq-len", 64, "--output", tmp_path / "artifact")
    assert done.returncode == 2 and named in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_stretched_checkpoint_is_one(short, tmp_path):
    stretched = stretch_checkpoint(short, 2.5, tmp_path / "stretched")
    assert read_config(stretched).longest_sequence == 640
    assert (stretched / "model.safetensors").resolve() == short / "model.safetensors"
    assert stretch_checkpoint(short, 2.5, tmp_path / "stretched") == stretched
    with pytest.raises(SmolLM3Error, match="something else is there"):
        stretch_checkpoint(short, 3, tmp_path / "stretched")
    with pytest.raises(SmolLM3Error, match="rope_scaling is .*yarn.* already"):
        stretch_checkpoint(stretched, 2, tmp_path / "twice")
    with pytest.raises(SmolLM3Error, match=r"from 2 to 640$"):  # stretching what is stretched is no advice
        Settings(seq_len=641).checked(read_config(stretched))
    # transformers 5's spelling of the same
    newer = tmp_path / "newer"
    shutil.copytree(short, newer)
    config = json.loads((newer / "config.json").read_text())
    theta = config.pop("rope_theta")
    parameters = {"rope_theta": theta, "rope_type": "default"}
    (newer / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
    assert read_config(stretch_checkpoint(newer, 2.5, tmp_path / "of_newer")) == read_config(stretched)


@pytest.mark.parametrize("context", [257, 300, 511, 1000, 100_003])
def test_the_factor_reaches_what_was_asked_for(context, short):
    config = read_config(short)
    assert int(factor_for(config, context) * config.max_position_embeddings) == context


@pytest.mark.parametrize("windows", [False, True])
def test_the_reference_runs_the_last_positions_one_by_one(windows, short, tmp_path):
    from smollm3_neuron.check import streamed_reference

    folder = tmp_path / "model"
    shutil.copytree(short, folder)
    config = json.loads((folder / "config.json").read_text())
    changes = {"use_sliding_window": True, "sliding_window": 16, "layer_types": None} if windows else {}
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    ids = [(7 + 31 * i) % 200 for i in range(100)]
    (whole,) = streamed_reference.StreamedModel(folder, torch.float64).logits([ids], [5])
    model = streamed_reference.StreamedModel(folder, torch.float64)
    lengths = []
    model.layers[0].register_forward_pre_hook(lambda layer, args: lengths.append(args[0].shape[1]))
    (singly,) = model.logits([ids], [5], one_by_one=True)
    assert lengths == [95, 1, 1, 1, 1, 1]
    torch.testing.assert_close(singly, whole, rtol=0, atol=1e-12)


def test_the_reference_makes_no_mask(short):
    from smollm3_neuron.check.streamed_reference import StreamedModel

    model = StreamedModel(short, torch.float32)
    for _ in model.logits([[3, 5, 7, 9]], [1]):
        assert [outline.given["attention_mask"] for outline in model._model.layers] == [None] * len(model.layers)


def test_the_references_mlps_run_in_pieces(short, monkeypatch):
    from smollm3_neuron.check import streamed_reference

    ids = [(7 + 31 * i) % 200 for i in range(200)]
    (whole,) = streamed_reference.StreamedModel(short, torch.float64).logits([ids], [3])
    monkeypatch.setattr(streamed_reference, "ROWS", 64)
    (pieces,) = streamed_reference.StreamedModel(short, torch.float64).logits([ids], [3])
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)


# validate.py, with the anonymous memory that it took over the imports, in GB, on a line of its own
MEASURED = """
import sys, threading, time
sys.path[:0] = ["scripts", "tools"]
import torch, transformers.models.smollm3.modeling_smollm3
from bench_sharding import Anonymous
import validate, common

with Anonymous() as memory:
    try:
        validate.main()
    except SystemExit as end:
        code = end.code
print("peak", (memory.peak - memory.first) / 1e9)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("length", [4096, 16384, 65536, 131071])
def test_a_small_model_of_65536_positions(length, tmp_path):
    """Beyond its positions by YaRN. The memory is the whole command's: artifact, reference and answers."""
    from reference import make_checkpoint

    shape = dict(vocab_size=2048, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1)
    layers = dict(num_hidden_layers=2, no_rope_layers=[1, 0], max_position_embeddings=65536, rope_theta=5e6)
    checkpoint, artifact = Path(make_checkpoint(tmp_path / "model", **shape, **layers)), tmp_path / "artifact"
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TINY / file, checkpoint)
    yarn = ["--context", "131072"] if length > 65536 else []
    seq_len = 131072 if yarn else length
    command = ["--model", checkpoint, "--tp", "1", "--seq-len", seq_len, "--dtype", "float32", "--output", artifact]
    assert (done := run("compile", *command, *yarn)).returncode == 0, done.stderr
    arguments = [artifact, "--length", str(length), "--max-new-tokens", "4"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *arguments], cwd=ROOT, text=True, capture_output=True, env={**os.environ}
    )
    print(done.stdout)
    assert done.returncode == 0 and "verdict: identical" in done.stdout, done.stderr
    assert float(done.stdout.split("peak ")[1]) <= 2
