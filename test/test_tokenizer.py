"""A tokenizer as transformers 4 or 5 wrote it, or with less beside it: the artifact's is the checkpoint's, or one line
says what is wrong before anything is compiled."""

import json
import shutil

import pytest
from commands import run
from places import ROOT
from transformers import AutoTokenizer

from smollm3_neuron.artifact.folder import Artifact
from smollm3_neuron.artifact.tokenizer import write_tokenizer
from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import chat
from smollm3_neuron.machine.locate import tiny_folder

TEXT = "<|im_start|>user\ndon't stop, please?<|im_end|>\n"
CONFIG = json.loads((tiny_folder() / "tokenizer_config.json").read_text())
TEMPLATE = (tiny_folder() / "chat_template.jinja").read_text()


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "artifact").mkdir()
    return shutil.copytree(tiny_folder(), tmp_path / "checkpoint")


def written(checkpoint):
    folder = checkpoint.parent / "artifact"
    write_tokenizer(checkpoint, folder)
    return Artifact(folder, {"files": [path.relative_to(folder).as_posix() for path in folder.rglob("*")]}).tokenizer()


def without(*names, **changes):
    return {name: value for name, value in CONFIG.items() if name not in names} | changes


AS_MET = {
    "of transformers 4": CONFIG,
    "of transformers 5": without("extra_special_tokens", tokenizer_class="TokenizersBackend", backend="tokenizers"),
    "further tokens as a list": without(extra_special_tokens=["<|im_start|>"]),
    "no class": without("tokenizer_class"),
    "no file": None,
}


@pytest.mark.parametrize("case", AS_MET)
def test_the_artifacts_tokenizer_is_the_checkpoints(checkpoint, case):
    expected = AutoTokenizer.from_pretrained(tiny_folder())
    (checkpoint / "tokenizer_config.json").unlink()
    if AS_MET[case] is not None:
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(AS_MET[case]))
    tokenizer = written(checkpoint)
    assert tokenizer(TEXT)["input_ids"] == expected(TEXT)["input_ids"]
    assert tokenizer.decode(range(508)) == expected.decode(range(508))
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 3 and tokenizer.chat_template == TEMPLATE
    if "list" in case:
        assert tokenizer.additional_special_tokens == ["<|im_start|>"]


def test_the_artifact_loads_beside_no_config(checkpoint):
    (checkpoint / "tokenizer_config.json").unlink()
    written(checkpoint)
    assert not (checkpoint.parent / "artifact/config.json").exists()
    assert json.loads((checkpoint.parent / "artifact/tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast"
    }


@pytest.mark.parametrize("form", ["a list in tokenizer_config.json", "files"])
def test_several_templates(checkpoint, form):
    other = "{{ 'With tools.' }}" + TEMPLATE
    if form == "files":
        (checkpoint / "additional_chat_templates").mkdir()
        (checkpoint / "additional_chat_templates/tool_use.jinja").write_text(other)
    else:
        (checkpoint / "chat_template.jinja").unlink()
        listed = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": other}]
        (checkpoint / "tokenizer_config.json").write_text(json.dumps(without(chat_template=listed)))
    tokenizer = written(checkpoint)
    messages, tools = [{"role": "user", "content": "1+1="}], [{"name": "f"}]
    assert not chat.render(tokenizer, messages).startswith("With tools.")
    assert chat.render(tokenizer, messages, tools=tools).startswith("With tools.")
    of_vllm = (checkpoint.parent / "artifact" / chat.VLLM_TEMPLATE).read_text()
    assert of_vllm == chat.vllm_template(tokenizer)


@pytest.mark.parametrize(
    "file, content, parts",
    [
        ("tokenizer.json", "{}", ["checkpoint: its tokenizer does not load", "take the tokenizer's files"]),
        ("tokenizer.json", '{"version"', ["tokenizer.json: not valid JSON"]),
        ("tokenizer_config.json", "[]", ["tokenizer_config.json: a JSON object is expected, found list"]),
        ("tokenizer_config.json", '{"tokenizer_class": "NoSuchTokenizer"}', ["does not load", "NoSuchTokenizer"]),
        ("special_tokens_map.json", "5", ["special_tokens_map.json: a JSON object is expected, found int"]),
        ("generation_config.json", "[]", ["generation_config.json: a JSON object is expected"]),
        ("chat_template.jinja", "{% if %}", ["its chat template does not render"]),
        ("chat_template.jinja", "{{ raise_exception('no') }}", ["its chat template does not render (no)"]),
    ],
)
def test_a_fault_is_one_line(checkpoint, file, content, parts):
    (checkpoint / file).write_text(content)
    with pytest.raises(SmolLM3Error) as error:
        written(checkpoint)
    assert [part for part in parts if part not in str(error.value)] == [] and "\n" not in str(error.value)


@pytest.mark.parametrize("is_there", [True, False])
def test_compile_offers_text_only_where_there_is_a_tokenizer(is_there, checkpoint, tmp_path):
    if not is_there:
        (checkpoint / "tokenizer.json").unlink()
    words = ["--model", checkpoint, "--tp", 1, "--seq-len", 64, "--device", "cpu", "--output", tmp_path / "compiled"]
    done = run(ROOT / "scripts/compile.py", *words)
    assert done.returncode == 0, done.stderr
    said = "Run it: python scripts/generate.py" if is_there else "It has no tokenizer.json: to give it text, add"
    assert done.stdout.splitlines()[-1].startswith(said)
