"""The commands as a user runs them: bad input is one line and exit code 2, and leaves nothing behind."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import run as run_command
from manifests import rewrite

from smollm3_neuron.machine.locate import tiny_folder

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--seq-len", "64", "--dtype", "float32"]


def run(script: str, *args, **environment) -> subprocess.CompletedProcess:
    return run_command(ROOT / f"scripts/{script}.py", *args, **environment)


def refused(done: subprocess.CompletedProcess, *parts: str) -> None:
    lines = [line for line in done.stderr.splitlines() if line]
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert [part for part in parts if part not in lines[0]] == [], lines[0]


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(tiny_folder(), tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    output = tmp_path_factory.mktemp("artifact") / "tiny"
    done = run("compile", "--model", "tiny", "--tp", 2, "--batch-size", 2, *SMALL, "--output", output)
    assert done.returncode == 0, done.stderr
    return output


def compiled(tmp_path: Path) -> list[str]:
    return [p.name for p in tmp_path.iterdir() if "artifact" in p.name]


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--model", "/no/such/folder"], ["/no/such/folder: no such folder", "tiny"]),
        (["--model", "nosuchmodel"], ["nosuchmodel: no such folder"]),
        (["--model", "folder/SmolLM3.Q8_0.gguf"], ["SmolLM3.Q8_0.gguf: GGUF is not read", "safetensors"]),
        (
            ["--model", "ggml-org/SmolLM3-3B-GGUF"],
            ["ggml-org/SmolLM3-3B-GGUF: GGUF is not read", "HuggingFaceTB/SmolLM3-3B"],
        ),
        (["--tp", "0"], ["tp_degree is 0", "1 to 32"]),
        (["--tp", "33"], ["tp_degree is 33", "1 to 32"]),
        (["--seq-len", "1"], ["seq_len is 1", "from 2 to 4096"]),
        (["--seq-len", "5000"], ["seq_len is 5000", "4096"]),
        (["--max-context-length", "96"], ["max_context_length is 96", "64"]),
        (["--batch-size", "0"], ["batch_size is 0"]),
        (["--dtype", "int8"], ["dtype is 'int8'", "bfloat16"]),
        (["--device", "neuron"], ["Neuron SDK is not installed", "--device cpu"]),
        (["--device", "gpu"], ["device is 'gpu'", "neuron, cpu"]),
        (["--quantized", "--quantization-dtype", "int4"], ["quantization_dtype is 'int4'", "'int8' or 'f8e4m3'"]),
        (["--merge-adapter", "/no/such/adapter"], ["/no/such/adapter: no adapter_config.json there"]),
        (["--windowed-context-encoding-size", "48"], ["windowed_context_encoding_size", "a context of 64", "48"]),
        (
            ["--windowed-context-encoding-size", "32"],
            ["CPU runtime does not support windowed_context_encoding_size=32"],
        ),
        (
            ["--sequence-parallel-enabled"],
            ["CPU runtime does not support sequence_parallel_enabled=True", "leave it out"],
        ),
        (
            ["--async-mode", "--on-device-sampling-config", '{"top_k": 1}'],
            ["CPU runtime does not support async_mode=True"],
        ),
        (["--is-prefix-caching", "--seq-len", "128"], ["CPU runtime does not support is_prefix_caching=True"]),
        (["--on-device-sampling-config", "{bad"], ["--on-device-sampling-config is '{bad'", "JSON object"]),
        (["--device", "hlo", "--weights-only"], ["--device hlo writes graphs and no weights"]),
        (["--nxd-source", "a:b"], ["--nxd-source is for --device hlo, which is 'auto'"]),
        (["--weights-only"], ["no artifact there whose graphs could be kept"]),
    ],
)
def test_compile_refuses(tmp_path, args, parts):
    refused(run("compile", "--model", "tiny", *SMALL, "--output", tmp_path / "artifact", *args), *parts)
    assert compiled(tmp_path) == []


def test_a_hub_that_cannot_be_reached_is_said(tmp_path):
    done = run("compile", "--output", tmp_path / "artifact", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    refused(
        done,
        "HuggingFaceTB/SmolLM3-3B at revision a07cc9a0",
        "the hub cannot be reached",
        "--model FOLDER",
        "--model tiny",
    )
    assert compiled(tmp_path) == []


def broken(folder: Path, what: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    weights = folder / "model.safetensors"
    if what == "no config":
        (folder / "config.json").unlink()
    elif what == "another model":
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    elif what == "short schedule":
        (folder / "config.json").write_text(json.dumps({**config, "no_rope_layers": [1, 0]}))
    elif what == "other shapes":
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    elif what.startswith("truncated "):
        file = folder / what.removeprefix("truncated ")
        file.write_bytes(file.read_bytes()[:-9])
    elif what == "no weights":
        weights.unlink()
    elif what == "torn header":
        weights.write_bytes(weights.read_bytes()[:50])
    elif what == "missing shard":
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}})
        )


@pytest.mark.parametrize(
    "what, parts",
    [
        ("no config", ["no config.json there"]),
        *(
            (f"truncated {name}.json", [f"{name}.json: not valid JSON"])
            for name in ("config", "tokenizer", "generation_config")
        ),
        ("another model", ["model_type is 'llama'", "'smollm3'"]),
        ("short schedule", ["no_rope_layers has 2 entries", "8"]),
        ("other shapes", ["mlp", "config.json asks for"]),
        ("no weights", ["neither model.safetensors.index.json nor model.safetensors there"]),
        ("truncated model.safetensors", ["model.safetensors: not a whole safetensors file"]),
        ("torn header", ["model.safetensors: not a whole safetensors file"]),
        ("missing shard", ["gone.safetensors: missing"]),
    ],
)
def test_compile_refuses_a_broken_checkpoint(checkpoint, tmp_path, what, parts):
    broken(checkpoint, what)
    refused(run("compile", "--model", checkpoint, *SMALL, "--output", tmp_path / "artifact"), *parts)
    assert compiled(tmp_path) == []


def test_compile_warns_of_a_head_that_it_drops(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    head = {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}
    save_file({**weights, **head}, checkpoint / "model.safetensors", {"format": "pt"})
    done = run("compile", "--model", checkpoint, "--tp", 2, "--seq-len", 16, "--output", tmp_path / "artifact")
    assert done.returncode == 0 and "warning: lm_head.weight differs from embed_tokens.weight" in done.stdout, done


@pytest.mark.parametrize(
    "args, parts",
    [
        (["1+1= " * 40], ["prompt 0 has", "max_context_length is 64"]),
        ([""], ["prompt 0 has no tokens"]),
        (["1+1=", "--tp", "4"], ["made for tp_degree 2, not 4"]),
        (["1+1=", "--max-new-tokens", "0"], ["max_new_tokens is 0"]),
        (["1+1=", "--temperature", "-1"], ["temperature is -1.0"]),
        (["1+1=", "--top-p", "2", "--temperature", "1"], ["top_p is 2.0"]),
        (["1+1=", "--top-p", "0.9"], ["temperature is 0", "--temperature"]),
        (["1+1=", "--no-think"], ["--chat"]),
        (["--messages", "a.json"], ["--messages", "add --chat"]),
        (["1+1=", "--chat", "--messages", "a.json"], ["not both"]),
        ([], ["give prompts"]),
        (["--chat", "--messages", "/no/such/file"], ["/no/such/file: cannot be read (No such file or directory)"]),
        (["1+1=", "--device", "neuron"], ["Neuron SDK is not installed"]),
    ],
)
def test_generate_refuses(artifact, args, parts):
    refused(run("generate", artifact, *args), *parts)


def test_generate_refuses_what_is_no_artifact(tmp_path):
    refused(run("generate", tmp_path, "1+1="), "no artifact.json in it")
    refused(run("generate", tmp_path / "none", "1+1="), "no such artifact")
    refused(run("validate", tmp_path / "none"), "no such artifact")


def test_generate_answers(artifact):
    done = run("generate", artifact, "The square root of 144 is", "--max-new-tokens", "4")
    assert done.returncode == 0 and done.stdout.startswith("The square root of 144 is 12"), done.stderr
    both = run("generate", artifact, "The square root of 144 is", "1+1=", "--max-new-tokens", "4").stdout.splitlines()
    assert both[0] == f"[0] {done.stdout.splitlines()[0]}" and both[1].startswith("[1] 1+1=2")


def test_sampling_repeats_with_its_seed(artifact):
    def sample(seed):
        return run("generate", artifact, "1+1=", "--temperature", "3", "--seed", seed, "--max-new-tokens", "16").stdout

    first, again, other = sample(1), sample(1), sample(2)
    assert first == again != other


def test_chat_in_both_modes(artifact):
    for mode in ("--think", "--no-think"):
        done = run("generate", artifact, "What is 3+4?", "--chat", mode, "--max-new-tokens", "8")
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_chat_samples_as_the_checkpoint_asks(artifact, tmp_path):
    conversation = tmp_path / "conversation.json"
    messages = [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "12+9= 3+4= 1 * 1 ="}]
    conversation.write_text(json.dumps(messages))

    def answer(*args):
        done = run("generate", artifact, "--chat", "--messages", conversation, "--max-new-tokens", "24", *args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    asked = json.loads((artifact / "generation_config.json").read_text())
    assert asked["do_sample"] and answer() == answer("--temperature", asked["temperature"], "--top-p", asked["top_p"])
    seeds = {answer("--temperature", "3", "--top-p", "1", "--seed", seed) for seed in (1, 2)}
    assert len(seeds) == 2 and answer("--temperature", "0") not in seeds


@pytest.mark.parametrize(
    "given, threads", [("2,4", 2), (" 3 ", 3), ("", None), ("abc", None), ("0", None), ("-1", None), ("9" * 5000, None)]
)
def test_threads_of_the_environment(given, threads, monkeypatch):
    """A list has one for each level, and what is no number is left to the OpenMP library."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import os

    from benchmark import threads_of_environment

    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert threads_of_environment() == (threads or os.cpu_count())


def test_prompts_may_stand_behind_options(artifact):
    done = run("generate", artifact, "--device", "cpu", "--max-new-tokens", "4", "1+1=")
    assert done.returncode == 0 and done.stdout.startswith("1+1="), done.stderr


@pytest.mark.parametrize("cleaned_up", [False, True])
def test_what_is_streamed_is_what_is_decoded(monkeypatch, capsys, cleaned_up):
    """Cleaning up takes spaces away that were there one token before."""
    from transformers import AutoTokenizer

    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from generate import Printer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder(), clean_up_tokenization_spaces=cleaned_up)
    for text in ("don't stop, please?", "do n't stop , please ? I 'm 's 've ' re ' a . . . b ! ü→漢字 ' ", "a", " . "):
        printer = Printer(tokenizer, [""])
        tokens = tokenizer(text)["input_ids"]
        for token in tokens:
            printer(0, token)
        printer.close()
        assert capsys.readouterr().out == tokenizer.decode(tokens, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(
    "fields, args, parts",
    [
        ({"num_beams": 4}, [], ["num_beams is 4, which is not done here", "generation_config.json"]),
        ({"top_k": -1}, ["--chat"], ["top_k is -1", "generation_config.json"]),
        ({"eos_token_id": "x"}, [], ["eos_token_id is 'x'"]),
        ({"temperature": None, "top_k": 0}, ["--chat"], None),
        ({"repetition_penalty": 1.3, "suppress_tokens": [3], "min_p": 0.05}, ["--chat"], None),
    ],
)
def test_a_generation_config_as_met(artifact, tmp_path, fields, args, parts):
    copy = shutil.copytree(artifact, tmp_path / "copy")
    config = json.loads((copy / "generation_config.json").read_text())
    rewrite(copy, {"generation_config.json": json.dumps({**config, **fields}).encode()})
    done = run("generate", copy, "1+1=", "--max-new-tokens", "4", *args)
    if parts:
        refused(done, *parts)
    else:
        assert done.returncode == 0, done.stderr


def test_more_tokens_than_the_context_has_left_are_said(artifact):
    done = run("generate", artifact, "1+1=", "--max-new-tokens", "1000")
    assert done.returncode == 0 and "--max-new-tokens 1000, but prompt 0 leaves" in done.stderr
    assert "note:" not in run("generate", artifact, "1+1=", "--max-new-tokens", "16").stderr


def test_the_same_again_is_recognised_and_nothing_is_written(artifact):
    def written() -> dict[Path, tuple[int, int]]:
        return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in [artifact, *artifact.rglob("*")]}

    before = written()
    done = run("compile", "--model", "tiny", "--tp", 2, "--batch-size", 2, *SMALL, "--output", artifact)
    assert "nothing to do" in done.stdout and done.returncode == 0
    assert written() == before


@pytest.fixture(scope="module")
def stale(artifact, tmp_path_factory):
    """The artifact with another checkpoint's shard on one rank: its files have the sizes that its manifest names."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(artifact, tmp_path_factory.mktemp("stale") / "tiny")
    shard = folder / "weights/tp1_sharded_checkpoint.safetensors"
    weights = load_file(shard)
    weights["layers.2.mlp.down_proj.weight"] = -weights["layers.2.mlp.down_proj.weight"]
    save_file(weights, shard)
    return folder


def test_validate_says_right_and_writes_it_down(artifact, tmp_path):
    page, found = tmp_path / "page.html", tmp_path / "found.json"
    done = run("validate", artifact, "--max-new-tokens", 3, "--json", found, "--html", page)
    assert done.returncode == 0 and "verdict: identical" in done.stdout, done.stdout + done.stderr
    *_, power, _, last = done.stdout.splitlines()
    assert power == "finds 46 of 46 seeded faults in float32"
    assert last.startswith("57 of 57 prompts equal to transformers' (cpu, tp_degree 2, float32, 3 new tokens")
    cases = json.loads(found.read_text())["cases"]
    assert [sum(case["kind"] == kind for case in cases) for kind in ("prompt", "chat", "text")] == [57, 6, 1]
    assert {case["verdict"] for case in cases} == {"identical"}
    text = page.read_text()
    assert text.count("<svg") == 3 and text.count("<tr>") == 65
    assert not [word for word in ("href", "src=", "url(", "<script") if word in text], (
        "the page needs something outside of it"
    )


def test_validate_says_wrong(stale, tmp_path):
    done = run("validate", stale, "--max-new-tokens", 1)
    assert done.returncode == 1 and "verdict: wrong" in done.stdout, done.stdout + done.stderr
    refused(run("validate", stale, "--html", tmp_path / "no/page.html"), "no/page.html: no such folder")


def test_a_damaged_reference_is_no_verdict(artifact, checkpoint, tmp_path):
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    for script in ("validate", "inspect_layers"):
        refused(run(script, artifact, "--model", checkpoint), "model.safetensors: not a whole safetensors file")
    weights.write_bytes(whole)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    refused(
        run("validate", artifact, "--model", checkpoint), f"vocab_size is {config['vocab_size'] + 1}, the artifact's"
    )


def test_what_breaks_a_judge_is_no_verdict(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import common

    def main():
        raise RuntimeError("broken")

    for code, options in ((2, {"failed": 2}), (1, {})):
        with pytest.raises(SystemExit) as stopped:
            common.run(main, **options)
        assert stopped.value.code == code and "RuntimeError: broken" in capsys.readouterr().err


def test_inspect_layers_finds_the_layer(artifact, stale):
    done = run("inspect_layers", artifact)
    assert done.returncode == 0 and "124 values of 8 layers agree" in done.stdout, done.stdout + done.stderr
    done = run("inspect_layers", stale)
    assert done.returncode == 1 and "first difference: layer 2, mlp_output" in done.stdout, done.stdout + done.stderr


def test_benchmark_refuses(artifact, tmp_path):
    refused(run("benchmark"), "pass artifacts, or --shape")
    refused(
        run("benchmark", artifact, "--prompt-lengths", 60, "--new-tokens", 8), "--prompt-lengths 60", "sequence of 64"
    )
    refused(run("benchmark", artifact, "--new-tokens", 1), "new_tokens is 1", "at least 2")
    refused(run("benchmark", artifact, "--json", tmp_path / "no/file.json"), "no/file.json: no such folder")


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--quantization-type", "per_channel_symmetric", "--quantization-dtype", "f8e4m3", "--fused-qkv"],
    ],
)
def test_8_bit_weights_are_what_they_stand_for(flags, tmp_path):
    artifact = tmp_path / "artifact"
    done = run("compile", "--model", "tiny", "--tp", 2, *SMALL, "--quantized", *flags, "--output", artifact)
    assert done.returncode == 0, done.stderr
    done = run("validate", artifact, "--json", tmp_path / "report.json")
    assert done.returncode == 0 and "verdict: identical" in done.stdout, done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    perplexity = report["perplexity"]
    assert f"of the whole weights in bfloat16 {perplexity['unquantized']:.5f}" in done.stdout
    assert (
        abs(perplexity["model"] / perplexity["exact"] - 1)
        < 1e-5
        < abs(perplexity["unquantized"] / perplexity["exact"] - 1)
    )
    done = run("inspect_layers", artifact)
    assert done.returncode == 0, done.stdout
