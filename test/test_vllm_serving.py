"""What vllm-neuron asks of the model, on the CPU runtime; test/vllm/recorded.json is what the real one asks."""

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.folder import open_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate.chat import VLLM_TEMPLATE, guarded_template
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model import switches
from smollm3_neuron.model.config import read_config
from smollm3_neuron.vllm import serving

ensure_neuronx()
RECORDED = json.loads((Path(__file__).parent / "vllm/recorded.json").read_text())
KEYWORDS = RECORDED["keywords"]
SETTINGS = Settings(tp_degree=1, batch_size=4, seq_len=256, torch_dtype="float32")
CONFIG_MD5 = """
import hashlib, json, sys
from smollm3_neuron.machine.runtime import ensure_neuronx; ensure_neuronx()
from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config
from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM as cls
config = cls.get_config_cls()(
    cls.get_neuron_config_cls()(**json.loads(sys.argv[1])), load_config=load_pretrained_config(sys.argv[2])
)
print(hashlib.md5(config.to_json_string().encode("utf-8")).hexdigest())
"""


def model_cls():
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    return NeuronSmolLM3ForCausalLM


def served_config(**changes):
    """As vllm-neuron builds it."""
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    neuron_config = model_cls().get_neuron_config_cls()(**{**KEYWORDS, **changes})
    return model_cls().get_config_cls()(neuron_config, load_config=load_pretrained_config(str(tiny_folder())))


@pytest.mark.parametrize("sampling", ["on-device", "host"])
def test_the_hash_is_that_of_the_real_library_in_every_process(tmp_path, sampling):
    keywords = KEYWORDS if sampling == "on-device" else {**KEYWORDS, "on_device_sampling_config": None}
    elsewhere = shutil.copytree(tiny_folder(), tmp_path / "elsewhere")
    for seed, folder in ((1, tiny_folder()), (2, elsewhere)):
        command = [sys.executable, "-c", CONFIG_MD5, json.dumps(keywords), str(folder)]
        path = ":".join(sys.path)
        done = subprocess.run(
            command, capture_output=True, text=True, env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": path}
        )
        assert done.stdout.strip() == RECORDED["md5"]["0.8.0"][sampling], done.stderr[-2000:]


def test_an_artifact_for_vllm_has_the_keywords_of_vllm_neuron():
    settings = serving.settings_of_server(SETTINGS).checked(read_config(tiny_folder()))
    for name, value in vars(settings).items():
        if name == "on_device_sampling_config":
            assert value.items() <= KEYWORDS[name].items()
        elif name in KEYWORDS and not name.startswith("pa_"):  # the blocks of prefix caching, which is off
            assert value == KEYWORDS[name], name
        else:
            assert value == getattr(Settings, name), name
    assert serving.settings_of_server(replace(SETTINGS, batch_size=1)).is_continuous_batching is False


def test_an_unknown_keyword_is_named():
    with pytest.raises(
        SmolLM3Error, match="NeuronConfig has no 'fuse_qkv' in the installed NxD Inference, only 'fused_qkv'"
    ):
        served_config(fuse_qkv=True)


def test_only_an_artifact_that_is_missing_makes_it_recompile(tmp_path):
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        model_cls()(str(tmp_path / "none"))
    assert not isinstance(error.value, SmolLM3Error)
    served_config().save(tmp_path)
    model = model_cls()(str(tmp_path))
    assert model.config.to_json_string() == served_config().to_json_string()
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        model.load(str(tmp_path))
    assert not isinstance(error.value, SmolLM3Error)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    settings = serving.settings_of_server(SETTINGS)
    return compile_artifact(tiny_folder(), tmp_path_factory.mktemp("artifact") / "tiny", settings, "cpu", name="tiny")


def server_flags(artifact) -> tuple[dict, list[str]]:
    environment, *words = shlex.split(serving.serve_command(artifact))
    assert environment == f"NEURON_COMPILED_ARTIFACTS={artifact.path}" and words[:3] == [
        "vllm",
        "serve",
        str(tiny_folder()),
    ]
    return {a: b for a, b in zip(words, words[1:]) if a.startswith("--")}, words


def test_the_command_that_serves_an_artifact(artifact):
    flags, words = server_flags(artifact)
    assert (
        flags["--tensor-parallel-size"] == "1" and flags["--max-num-seqs"] == "4" and flags["--max-model-len"] == "256"
    )
    assert flags["--max-num-batched-tokens"] == "256" and "--no-enable-chunked-prefill" in words
    assert flags["--dtype"] == "float32" and "--additional-config" not in words
    template = Path(flags["--chat-template"])
    assert template.name == VLLM_TEMPLATE
    assert template.read_text() == guarded_template((tiny_folder() / "chat_template.jinja").read_text())
    open_artifact(artifact.path, "cpu")  # the template is among its files

    changes = {"on_device_sampling_config": None, "fused_qkv": True}
    changes |= {"attn_kernel_enabled": True, "padded_intermediate_size": 240}
    other = replace(artifact, manifest={**artifact.manifest, "settings": {**artifact.manifest["settings"], **changes}})
    assert json.loads(server_flags(other)[0]["--additional-config"]) == {"override_neuron_config": changes}

    changes = {"is_prefix_caching": True, "pa_block_size": 32, "pa_num_blocks": 32}
    other = replace(artifact, manifest={**artifact.manifest, "settings": {**artifact.manifest["settings"], **changes}})
    flags, words = server_flags(other)
    assert flags["--block-size"] == "32" and "--enable-prefix-caching" in words and "--additional-config" not in words
    with pytest.raises(SmolLM3Error, match="pa_num_blocks is 99: leave it out"):
        serving.settings_of_server(replace(SETTINGS, is_prefix_caching=True, pa_num_blocks=99))


def test_a_server_looks_nothing_up():
    with pytest.raises(SmolLM3Error, match="speculation_length is 4: leave it out"):
        serving.settings_of_server(replace(SETTINGS, speculation_length=4))


def test_a_server_with_a_draft(artifact):
    """Its graphs are greedy, and vLLM is told of the draft by its own flag."""
    changes = {"speculation_length": 4, "enable_fused_speculation": True}
    changes["on_device_sampling_config"] = {"do_sample": False}
    settings = serving.settings_of_server(replace(SETTINGS, **changes))
    assert settings.on_device_sampling_config == {"do_sample": False} and settings.enable_bucketing
    model = {**artifact.manifest["model"], "draft": {"folder": "/drafts/small"}}
    made = {"model": model, "settings": {**artifact.manifest["settings"], **changes}}
    flags, _ = server_flags(replace(artifact, manifest={**artifact.manifest, **made}))
    assert json.loads(flags["--speculative-config"]) == {
        "model": "/drafts/small", "num_speculative_tokens": 4, "method": "draft_model"
    }  # fmt: skip
    assert json.loads(flags["--additional-config"]) == {
        "override_neuron_config": {"on_device_sampling_config": {"do_sample": False}}
    }


def test_a_folder_with_a_draft(folder):
    """vllm-neuron builds the draft's config beside the model's; without a draft the server asks for something else."""
    path = folder / "neuron_config.json"
    content = json.loads(path.read_text())
    draft = {**json.loads(path.read_text()), "hidden_size": 64}
    content["neuron_config"] |= {"enable_fused_speculation": True, "speculation_length": 4}
    path.write_text(json.dumps({**content, "fused_spec_config": {"draft_config": draft}}))
    of_draft = served_config()
    of_draft.hidden_size = 64
    serving.check_folder(of_draft)
    of_draft.neuron_config.fused_qkv = True
    with pytest.raises(SmolLM3Error, match="was made with fused_qkv False, the server asks for True"):
        serving.check_folder(of_draft)
    with pytest.raises(SmolLM3Error, match="speculation_length 4, the server asks for 0: change --speculative-config"):
        serving.check_folder(served_config())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Made by vllm-neuron's own compile: a config, and no artifact.json."""
    served_config().save(tmp_path)
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(tmp_path))
    return tmp_path


def test_a_folder_for_these_flags_is_taken(folder, monkeypatch):
    serving.check_folder(served_config())
    serving.check_folder(served_config(pa_block_size=16))  # read with prefix caching only
    (folder / "neuron_config.json").unlink()  # nothing yet: the server compiles into it
    serving.check_folder(served_config(batch_size=8))
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", "")
    serving.check_folder(served_config(batch_size=8))


def test_the_order_of_an_adapters_modules_does_not_count(folder):
    """The library makes a set of them, whose order is another in each process."""

    def adapters(*names, rank=4):
        config = served_config()
        lora = {"target_modules": list(names), "max_lora_rank": rank, "lora_ckpt_paths": {}, "lora_ckpt_paths_cpu": {}}
        config.neuron_config.lora_config = SimpleNamespace(**lora)
        return config

    adapters("q_proj", "up_proj").save(folder)
    serving.check_folder(adapters("up_proj", "q_proj"))
    for other in (adapters("up_proj"), adapters("up_proj", "q_proj", rank=8)):
        with pytest.raises(SmolLM3Error, match="was made with lora_config"):
            serving.check_folder(other)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"batch_size": 8}, ["batch_size 4, the server asks for 8: change --max-num-seqs"]),
        ({"seq_len": 128, "max_context_length": 128}, ["seq_len 256, the server asks for 128: change --max-model-len"]),
        ({"tp_degree": 2}, ["tp_degree 1, the server asks for 2: change --tensor-parallel-size"]),
        ({"torch_dtype": "bfloat16"}, ["torch_dtype 'float32', the server asks for 'bfloat16': change --dtype"]),
        ({"fused_qkv": True}, ["fused_qkv False, the server asks for True: change override_neuron_config"]),
        (
            {"padded_intermediate_size": 240},
            ["padded_intermediate_size None, the server asks for 240: change override_neuron_config"],
        ),
        ({"attn_kernel_enabled": True}, ["attn_kernel_enabled False, the server asks for True"]),
        (
            {"on_device_sampling_config": None},
            ["on_device_sampling_config", "asks for None: change override_neuron_config"],
        ),
    ],
)
def test_a_folder_for_other_flags_is_refused(folder, changes, parts):
    with pytest.raises(SmolLM3Error) as error:
        serving.check_folder(served_config(**changes))
    assert [part for part in [f"NEURON_COMPILED_ARTIFACTS={folder}", *parts] if part not in str(error.value)] == []


@pytest.mark.parametrize(
    "name, value",
    [("no_rope_layers", [1] * 8), ("vocab_size", 300), ("rope_theta", 1e4), ("tie_word_embeddings", False)],
)
def test_a_folder_of_another_model_is_refused(folder, name, value):
    path = folder / "neuron_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(SmolLM3Error, match=f"was made for a checkpoint with {name}"):
        serving.check_folder(served_config())


@pytest.mark.parametrize("text", ["{", "{}", "[]"])
def test_a_damaged_folder_is_refused(folder, text):
    (folder / "neuron_config.json").write_text(text)
    with pytest.raises(SmolLM3Error, match="neuron_config.json: (damaged|not valid JSON)"):
        serving.check_folder(served_config())


def test_an_artifact_is_checked_whole(artifact, monkeypatch):
    monkeypatch.setenv("NEURON_COMPILED_ARTIFACTS", str(artifact.path))
    with pytest.raises(SmolLM3Error, match="made for 'cpu', but this is 'neuron'"):
        serving.check_folder(served_config())


def test_the_plugin_has_the_folder_checked_while_the_config_is_built(folder):
    """In a process of its own: registering is for good."""
    code = (
        "import sys; from smollm3_neuron.machine.runtime import ensure_neuronx; ensure_neuronx()\n"
        "from smollm3_neuron.vllm.plugin import register; register()\n"
        "import neuronx_distributed_inference.utils.constants\n" + CONFIG_MD5
    )
    for batch_size, said in ((4, None), (8, "batch_size 4, the server asks for 8: change --max-num-seqs")):
        keywords = json.dumps({**KEYWORDS, "batch_size": batch_size})
        environment = {"PYTHONPATH": ":".join(sys.path), "NEURON_COMPILED_ARTIFACTS": str(folder)}
        command = [sys.executable, "-c", code, keywords, str(tiny_folder())]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert (done.returncode == 0) is (said is None) and (said or "") in done.stderr, done.stderr[-2000:]


def test_keywords_of_another_release_are_unknown_too():
    with pytest.raises(SmolLM3Error, match="no 'of_tomorrow' in the installed NxD Inference: correct it"):
        switches.check_keywords({"of_tomorrow": 1}, SimpleNamespace())
