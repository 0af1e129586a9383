"""Each file of a checkpoint as transformers 4.57 and as transformers 5 writes it is read the same (see written.py)."""

import json
import shutil
from pathlib import Path

import pytest
import written
from transformers import AutoTokenizer, GenerationConfig, SmolLM3ForCausalLM

from smollm3_neuron.artifact import build
from smollm3_neuron.artifact.folder import Artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.artifact.tokenizer import write_tokenizer
from smollm3_neuron.check.reference import load_reference, reference_generate
from smollm3_neuron.generate import chat
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.generate.sampling import Sampling
from smollm3_neuron.machine.locate import tiny_folder
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import fields_for_transformers, read_config

QUESTION = [{"role": "user", "content": "What is 3+4?"}]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """`tiny` saved by the installed transformers, and the same as the next version writes it."""
    folder = tmp_path_factory.mktemp("both")
    SmolLM3ForCausalLM.from_pretrained(tiny_folder(), dtype="auto").save_pretrained(folder / "4")
    AutoTokenizer.from_pretrained(tiny_folder()).save_pretrained(folder / "4")
    return folder / "4", written.checkpoint_of_5(folder / "4", folder / "5")


def test_a_checkpoint_of_transformers_5_answers_as_that_of_4(both, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "reason_to_keep_exported", lambda *_: "a test")
    ensure_neuronx()
    four, five = both
    settings = Settings(tp_degree=1, seq_len=128, torch_dtype="float32")
    artifact = build.compile_artifact(five, tmp_path / "artifact", settings, "cpu")
    tokenizer = artifact.tokenizer()
    prompt = tokenizer(chat.render(tokenizer, QUESTION), add_special_tokens=False)["input_ids"]
    assert prompt == AutoTokenizer.from_pretrained(four).apply_chat_template(QUESTION, add_generation_prompt=True)
    tokens = generate(artifact.load(), [prompt], 40)[0].tokens
    assert tokens == reference_generate(load_reference(four), prompt, 40).tokens
    assert artifact.eos_token_ids() == [3]


@pytest.mark.parametrize("name", ["plain", "untied", "biases", "yarn", "linear", "llama3", "window", "head-dim"])
def test_config_json(random_checkpoints, tmp_path, name):
    four = shutil.copytree(random_checkpoints[name], tmp_path / "4")
    oldest = written.read(four / "config.json")
    oldest["torch_dtype"] = oldest.pop("dtype")  # before 4.56
    (shutil.copytree(four, tmp_path / "before") / "config.json").write_text(json.dumps(oldest))
    five = written.checkpoint_of_5(four, tmp_path / "5")
    assert "rope_theta" not in written.read(five / "config.json")
    for other in (tmp_path / "before", five):
        assert read_config(other) == read_config(four)
        ours, theirs = fields_for_transformers(other), fields_for_transformers(four)
        for fields in (ours, theirs):
            del fields["transformers_version"]
            fields["dtype"] = fields.pop("torch_dtype", None) or fields["dtype"]
            fields.setdefault("tie_word_embeddings", True)
        assert ours == theirs


@pytest.mark.parametrize("further", [[], ["<|im_start|>", "<|end_of_text|>"]])
def test_tokenizer_config_and_special_tokens(both, tmp_path, further):
    four, tokenizers = shutil.copytree(both[0], tmp_path / "4"), []
    tokenizer = AutoTokenizer.from_pretrained(four)
    tokenizer.add_special_tokens({"additional_special_tokens": further})
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(four)
    for folder in (four, written.checkpoint_of_5(four, tmp_path / "5")):
        carried = tmp_path / f"artifact-{folder.name}"
        carried.mkdir()
        write_tokenizer(folder, carried)
        files = [path.relative_to(carried).as_posix() for path in carried.rglob("*") if path.is_file()]
        tokenizers.append(Artifact(carried, {"files": files}).tokenizer())
        assert ("special_tokens_map.json" in files) is (folder == four)
    text = "<|im_start|>user\ndon't stop<new>, please?<|im_end|>\n<tool_call>"
    one, other = tokenizers
    assert one(text)["input_ids"] == other(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert one.decode(range(513)) == other.decode(range(513))
    assert one.decode(range(513), skip_special_tokens=True) == other.decode(range(513), skip_special_tokens=True)
    assert sorted(one.all_special_ids) == sorted(other.all_special_ids)
    assert one.special_tokens_map == other.special_tokens_map
    assert chat.render(one, QUESTION) == chat.render(other, QUESTION)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"eos_token_id": [3, 1], "pad_token_id": 1}, {"do_sample": True, "temperature": 0.6, "top_p": 0.95},
        {"do_sample": True, "top_k": 7, "repetition_penalty": 1.2, "suppress_tokens": [5], "min_p": 0.1},
        {"stop_strings": ["x"], "max_new_tokens": 5},
    ],
)  # fmt: skip
def test_generation_config_json(tmp_path, fields):
    GenerationConfig(**fields).save_pretrained(tmp_path)
    four = written.read(tmp_path / "generation_config.json")
    five = written.generation_config_of_5(four)
    assert Sampling.of(four) == Sampling.of(five)
    assert Sampling.of(four).further.keys() == {*fields} & {"repetition_penalty", "suppress_tokens", "min_p",
                                                           "stop_strings"}  # fmt: skip


def test_the_forms_differ(both):
    """Else the tests above would compare a form with itself."""
    four, five = both
    for file in ("config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"):
        assert written.read(four / file) != written.read(five / file), file
    assert Path(four / "special_tokens_map.json").is_file() and not (five / "special_tokens_map.json").exists()
