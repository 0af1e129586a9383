"""LoRA adapters behind `vllm serve` on an emulated Neuron device: what SERVING.md says of vllm-neuron 0.4.1.

It needs what test_vllm.py does. Answers are compared with PEFT's on transformers.
"""

import json
import shutil
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from peft import LoraConfig, get_peft_model
from places import TINY
from reference import make_adapter
from test_lora import LINEARS, NEW_TOKENS
from test_lora_served import TEXTS, answer
from test_vllm import ON_HOST
from transformers import SmolLM3ForCausalLM
from vllm_on_device import compile_for_server, server

pytestmark = pytest.mark.emulator
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with the checkpoint, `tiny`, and adapters of it; `none` is one that changes nothing."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(TINY, folder / "tiny")
    make_adapter(TINY, folder / "all", target_modules=LINEARS)
    make_adapter(TINY, folder / "two", target_modules=["q_proj", "down_proj"], r=3)
    make_adapter(TINY, folder / "three", target_modules=LINEARS, r=8, lora_alpha=24)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(SmolLM3ForCausalLM.from_pretrained(TINY), config).save_pretrained(folder / "none")
    return folder


@pytest.fixture(autouse=True)
def only_what_was_tried(pair):
    if pair.vllm != "0.13":
        pytest.skip("SERVING.md says of vllm-neuron 0.5.0 what was read in its sources, and was not tried")


def command(files, out, content: dict, *flags: str, tp: int = 1, sampling=ON_HOST) -> list[str]:
    """The words that serve `all` and `two` by a file with this content; the first sets a variable."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "lora.json").write_text(json.dumps({"lora-ckpt-dir": str(files), **content}))
    override = {"override_neuron_config": {**sampling, "lora_ckpt_json": str(out / "lora.json")}}
    return [
        RUNTIME, "vllm", "serve", str(files / "tiny"), "--tensor-parallel-size", str(tp), "--max-num-seqs", "2",
        "--max-model-len", "64", "--dtype", "float32", "--no-enable-prefix-caching", "--enable-lora",
        "--max-lora-rank", "8", "--lora-modules", f"all={files / 'all'}", f"two={files / 'two'}",
        "--additional-config", json.dumps(override), *flags,
    ]  # fmt: skip


def named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def load(served, name: str, folder) -> int:
    """The status of a request that adds an adapter while the server runs."""
    body = json.dumps({"lora_name": name, "lora_path": str(folder)}).encode()
    request = urllib.request.Request(f"{served.url}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def ask(served, name: str, text: str = TEXTS[0]) -> tuple[int, str]:
    """The status, and the text that the adapter continues the prompt with."""
    status, body = served.answer(text, NEW_TOKENS, model=name, ignore_eos=False)
    return status, text + body["choices"][0]["text"] if status == 200 else ""


def wanted(files, name: str, text: str = TEXTS[0]) -> tuple[int, str]:
    return 200, answer(None if name == "none" else files / name, text)


def ends(served, name: str, said: str) -> None:
    """A request that names `name` gets status 500, and the server ends."""
    assert ask(served, name) == (500, "")
    assert served.process.wait(120) is not None
    assert said in served.log.read_text()


def test_adapters_of_the_file_until_a_request_names_the_model(pair, files, tmp_path):
    """Four adapters in two places of the device; a name is known once posted, whatever the folder."""
    content = {"lora-ckpt-paths": named("all", "two"), "lora-ckpt-paths-cpu": named("all", "two", "three", "none")}
    words = command(files, tmp_path, content, "--max-loras", "2", "--max-cpu-loras", "4")
    names = ["all", "two", "three", "none"] * 2
    assert len({wanted(files, name) for name in names}) == 4
    with server(pair, tmp_path, words) as served:
        assert ask(served, "three") == (404, "")
        assert [load(served, name, files / "two") for name in ("three", "none")] == [200, 200]
        asked = [(name, text) for text in TEXTS for name in names]
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(lambda one: ask(served, *one), asked))
        assert answers == [wanted(files, *one) for one in asked]
        ends(served, served.model, "AttributeError: 'NoneType' object has no attribute 'lora_name'")


def test_a_name_that_is_not_in_the_file_ends_the_server(pair, files, tmp_path):
    both = named("all", "two")
    words = command(
        files, tmp_path, {"lora-ckpt-paths": both, "lora-ckpt-paths-cpu": both}, "--max-loras", "2", tp=2
    )  # fmt: skip
    with server(pair, tmp_path, words) as served:
        assert load(served, "three", files / "three") == load(served, "nowhere", files / "nowhere") == 200
        assert [ask(served, name) for name in both] == [wanted(files, name) for name in both]
        ends(served, "three", "KeyError: 'three'")


def test_nxdi_0_9_0_loads_a_posted_folder(pair, files, tmp_path, nxd_releases):
    others = [release for release in nxd_releases if release.version.startswith("0.9")]
    if not others:
        pytest.skip("needs --nxd-source of NxD Inference 0.9.0, too")
    both = named("all", "two")
    content = {"lora-ckpt-paths": both, "lora-ckpt-paths-cpu": both}
    words = command(files, tmp_path, content, "--max-loras", "2", "--max-cpu-loras", "3")
    with server(replace(pair, release=others[0]), tmp_path, words) as served:
        assert [load(served, name, files / name) for name in ("three", "nowhere")] == [200, 400]
        names = ["three", "all", "two", "three"]
        assert [ask(served, name) for name in names] == [wanted(files, name) for name in names]
        ends(served, served.model, "AttributeError: 'NoneType' object has no attribute 'lora_name'")


def test_what_ends_the_start(pair, files, tmp_path):
    both = named("all", "two")
    content = {"lora-ckpt-paths": both, "lora-ckpt-paths-cpu": both}
    starts = {
        "file": (["--max-loras", "2"], {"lora-ckpt-paths": both}, "KeyError: 'lora-ckpt-paths-cpu'"),
        "count": ([], content, "the maximum number of adapters that can be hosted on CPU is 1"),
    }
    for start, (flags, of_file, said) in starts.items():
        out = tmp_path / start
        with pytest.raises(RuntimeError, match="no server"), server(pair, out, command(files, out, of_file, *flags)):
            pass
        assert said in (out / "log").read_text(), start


def test_an_artifact_without_adapters_is_not_taken(pair, files, tmp_path):
    both = named("all", "two")
    name, folder = compile_for_server(pair, tmp_path, 1)[0].split("=", 1)
    flags = "--max-loras", "2", "--max-num-seqs", "4", "--max-model-len", "256"
    words = command(
        files, tmp_path, {"lora-ckpt-paths": both, "lora-ckpt-paths-cpu": both}, *flags, sampling={}
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no server"), server(pair, tmp_path, words, **{name: folder}):
        pass
    assert "was made with lora_config None" in (tmp_path / "log").read_text()


def test_every_start_compiles(pair, files, tmp_path):
    """The library keeps the adapters beside the name of their file, and does not read both again."""
    both = named("all", "two")
    content = {"lora-ckpt-paths": both, "lora-ckpt-paths-cpu": both}
    words = command(files, tmp_path, content, "--max-loras", "2")
    cache = str(tmp_path / "executables")
    folder = {"NEURON_COMPILED_ARTIFACTS": str(tmp_path / "compiled"), "NEURON_EMULATOR_CACHE": cache}
    with server(pair, tmp_path / "first", words, **folder):
        assert (tmp_path / "compiled/model.pt").is_file()
    with server(pair, tmp_path / "second", words, **folder) as served:
        assert ask(served, "all") == wanted(files, "all")
        assert "The adapter ID all appears more than once in lora_ckpt_paths" in served.log.read_text()
