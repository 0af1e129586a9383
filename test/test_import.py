"""scripts/import_checkpoint.py: Flax and GGUF checkpoints become the safetensors that they were made from."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import foreign
import gguf
import msgpack
import numpy as np
import pytest
import torch
from places import ROOT, TINY
from reference import make_checkpoint
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, SmolLM3ForCausalLM

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.machine.locate import locate_model
from smollm3_neuron.model.config import read_config
from smollm3_neuron.weights.checkpoint import checkpoint_files
from smollm3_neuron.weights.imports.convert import import_checkpoint

RANDOM = {  # 4 layers, of which the last is NoPE unless a list says otherwise
    "plain": {},
    "untied-biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 32},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
FORMATS = {
    "flax": lambda source, folder: foreign.write_flax(source, folder),
    "flax, 3 files": lambda source, folder: foreign.write_flax(source, folder, shards=3),
    "flax, chunked": lambda source, folder: foreign.write_flax(source, folder, chunk=10_000),
    "gguf F32": lambda source, folder: foreign.write_gguf(source, folder.with_suffix(".gguf"), "F32"),
    "gguf BF16": lambda source, folder: foreign.write_gguf(source, folder.with_suffix(".gguf"), "BF16"),
}
# of the tokenizer.json of Llama 3
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PROMPTS = ("The square root of 144 is", "1+1=", "12345  don't\n\n  stop<think>x</think><|im_end|> ä 漢字 🚀")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    """`tiny` in bfloat16, the random ones in bfloat16 too, so that no format of the matrices loses anything."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {"tiny": TINY}
    for name, changes in RANDOM.items():
        found[name] = Path(make_checkpoint(folder / name, num_hidden_layers=4, **changes))
        tensors = {key: tensor.bfloat16() for key, tensor in load_file(found[name] / "model.safetensors").items()}
        save_file(tensors, found[name] / "model.safetensors", {"format": "pt"})
    return found


def logits(folder: Path) -> torch.Tensor:
    torch.set_num_threads(1)
    model = SmolLM3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(3, 3 + 48).reshape(1, -1) * 5 % model.config.vocab_size
    with torch.inference_mode():
        return model(tokens).logits


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["tiny", *RANDOM])
@pytest.mark.parametrize("form", FORMATS)
def test_an_import_is_the_checkpoint_it_was_made_from(form, name, checkpoints, tmp_path):
    source, output = checkpoints[name], tmp_path / "imported"
    import_checkpoint(FORMATS[form](source, tmp_path / "foreign"), output)
    before, after = stored(source), stored(output)
    assert before.keys() == after.keys()
    assert {key: tensor.dtype for key, tensor in after.items()} == {
        key: torch.float32 if form == "gguf F32" else torch.bfloat16 for key in before
    }
    assert [key for key in before if not torch.equal(before[key].float(), after[key].float())] == []
    ours, theirs = read_config(output), read_config(source)
    assert {key: ours[key] for key in theirs} == theirs
    assert torch.equal(logits(output), logits(source))


def test_the_logits_show_rows_left_in_llama_cpps_order(checkpoints, tmp_path, monkeypatch):
    """The test above could not fail if they did not: on a NoPE layer alone nothing would be seen."""
    monkeypatch.setattr("smollm3_neuron.weights.imports.gguf.unpermuted", lambda rows, head_dim: rows)
    import_checkpoint(foreign.write_gguf(checkpoints["plain"], tmp_path / "a.gguf"), tmp_path / "imported")
    assert (logits(tmp_path / "imported") - logits(checkpoints["plain"])).abs().max() > 0.1


@pytest.mark.parametrize("kind, block", [("Q8_0", 32), ("Q5_1", 32), ("Q4_0", 32), ("TQ2_0", 256)])
def test_quantized_tensors_are_dequantized_and_rounded_once(kind, block, tmp_path):
    """Blocks lie along a row, so reordering rows and quantizing them commute."""
    qtype = gguf.GGMLQuantizationType[kind]

    def kind_of(tensor):
        return kind if tensor.shape[-1] % block == 0 else "F32"

    done = import_checkpoint(foreign.write_gguf(TINY, tmp_path / "a.gguf", kind_of), tmp_path / "imported")
    assert [kind in note for note in done.notes] == [True]
    imported, quantized = stored(tmp_path / "imported"), 0
    for name, original in stored(TINY).items():
        expected = original.float()
        if original.dim() == 2 and kind_of(original) == kind:
            values = gguf.quants.dequantize(gguf.quants.quantize(expected.numpy(), qtype), qtype)
            expected, quantized = torch.from_numpy(values).bfloat16().float(), quantized + 1
        assert torch.equal(imported[name].float(), expected), name
    assert quantized > 40


@pytest.mark.parametrize("kind, scales", [("Q4_K", (0, 2)), ("Q5_K", (0, 2)), ("Q6_K", (208,)), ("IQ4_XS", (0,))])
def test_kinds_that_the_package_only_reads(kind, scales, tmp_path):
    """Random blocks in the place of the embedding and of a layer's queries; `scales`: where their float16 values lie."""
    qtype, random = gguf.GGMLQuantizationType[kind], np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[qtype][1]
    rows = random.integers(0, 256, (512, size), dtype=np.uint8)
    for at in scales:
        rows[:, at : at + 2] = random.uniform(0.01, 0.02, 512).astype(np.float16)[:, None].view(np.uint8)
    replaced = {"token_embd.weight": rows, "blk.1.attn_q.weight": rows[:256]}

    def change(name, data, stored_kind):
        return (replaced[name], qtype) if name in replaced else (data, stored_kind)

    import_checkpoint(foreign.write_gguf(TINY, tmp_path / "a.gguf", change=change), tmp_path / "imported")
    imported = stored(tmp_path / "imported")
    values = torch.from_numpy(gguf.quants.dequantize(rows, qtype)).bfloat16()
    assert values.isfinite().all() and torch.equal(imported["model.embed_tokens.weight"], values)
    queries = imported["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(foreign.permuted(queries, 16), values[:256])


def test_a_norm_that_bfloat16_cannot_hold_stays_float32(tmp_path):
    def change(name, data, kind):
        return (data * np.float32(1.001) if name == "output_norm.weight" else data), kind

    import_checkpoint(foreign.write_gguf(TINY, tmp_path / "a.gguf", change=change), tmp_path / "imported")
    imported, norm = stored(tmp_path / "imported"), stored(TINY)["model.norm.weight"].float() * np.float32(1.001)
    assert torch.equal(imported.pop("model.norm.weight"), norm)
    assert {tensor.dtype for tensor in imported.values()} == {torch.bfloat16}


# ---- what lies beside the weights ----


def same_tokenizer(one: Path, other: Path) -> None:
    one, other = AutoTokenizer.from_pretrained(one), AutoTokenizer.from_pretrained(other)
    assert len(one) == len(other) and one.eos_token == other.eos_token and one.pad_token == other.pad_token
    assert one.chat_template == other.chat_template and one.get_added_vocab() == other.get_added_vocab()
    for text in PROMPTS:
        tokens = one.encode(text)
        assert other.encode(text) == tokens
        for skip in (True, False):
            assert other.decode(tokens, skip_special_tokens=skip) == one.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("form", ["flax", "gguf BF16"])
def test_the_tokenizer_of_an_import(form, tmp_path):
    import_checkpoint(FORMATS[form](TINY, tmp_path / "foreign"), tmp_path / "imported")
    same_tokenizer(TINY, tmp_path / "imported")


@pytest.fixture(scope="module")
def llama3_like(tmp_path_factory, checkpoints) -> Path:
    """A checkpoint whose tokenizer is of Llama 3's kind, as SmolLM3-3B's: trained here on a few lines."""
    folder = shutil.copytree(checkpoints["plain"], tmp_path_factory.mktemp("llama3") / "checkpoint")
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = ["The square root of 144 is 12, don't stop.", "12345 123456 1234567", "\n\n  ab \n\n  ab"] * 3
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": size + 4, "eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    config["pad_token_id"] = None
    (folder / "config.json").write_text(json.dumps(config))
    tensors = stored(folder)
    tensors["model.embed_tokens.weight"] = torch.randn(size + 4, 128).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("pre, bos", [("smaug-bpe", False), ("llama-bpe", True)])
def test_a_tokenizer_of_llama_3s_kind(pre, bos, llama3_like, tmp_path):
    theirs = AutoTokenizer.from_pretrained(llama3_like)
    start = theirs.convert_tokens_to_ids("<|im_start|>")
    file = foreign.write_gguf(
        llama3_like, tmp_path / "a.gguf", pre=pre, edit=lambda writer: writer.add_bos_token_id(start)
    )
    assert import_checkpoint(file, tmp_path / "imported").notes == []
    ours = AutoTokenizer.from_pretrained(tmp_path / "imported")
    assert len(theirs) == len(ours)  # what only fills the embedding up is no token
    for text in PROMPTS:
        assert ours.encode(text) == [start] * bos + theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("pre", ["gpt-4o", None])
def test_a_tokenizer_that_is_not_known_is_not_guessed(pre, checkpoints, tmp_path):
    file = foreign.write_gguf(TINY if pre else checkpoints["plain"], tmp_path / "a.gguf", pre=pre)
    (note,) = import_checkpoint(file, tmp_path / "imported").notes
    assert (repr(pre) if pre else "no tokenizer") in note and "copy tokenizer.json" in note
    assert sorted(path.name for path in (tmp_path / "imported").iterdir()) == ["config.json", "model.safetensors"]


def test_what_lies_beside_a_gguf_file_is_taken_first(tmp_path):
    """config.json knows another NoPE schedule, which the file cannot say."""
    source = shutil.copytree(TINY, tmp_path / "source")
    config = json.loads((source / "config.json").read_text()) | {"no_rope_layers": [1, 0] * 4}
    (source / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "foreign"
    foreign.copy_beside(source, folder)
    foreign.write_gguf(source, folder / "tiny.gguf")
    import_checkpoint(folder, tmp_path / "from the folder")
    import_checkpoint(folder / "tiny.gguf", tmp_path / "from the file")
    assert read_config(tmp_path / "from the folder")["no_rope_layers"] == [1, 0] * 4
    assert read_config(tmp_path / "from the file")["no_rope_layers"] == [1, 1, 1, 0] * 2
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        assert (tmp_path / "from the folder" / name).read_bytes() == (source / name).read_bytes()
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 10000.0}))
    refused(folder, tmp_path, "rope_theta is 10000.0, in tiny.gguf it is 5000000.0")


# ---- what is refused: one line, and nothing is left behind ----


def refused(source: Path, tmp_path: Path, *parts: str) -> None:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SmolLM3Error) as error:
        import_checkpoint(source, tmp_path / "refused")
    assert "\n" not in str(error.value)
    assert [part for part in parts if part not in str(error.value)] == [], str(error.value)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("form", ["flax", "gguf BF16"])
def test_a_file_that_ends_too_early(form, tmp_path):
    """Wherever it was cut: in the header, in a name, before and in the last tensor."""
    source = FORMATS[form](TINY, tmp_path / "foreign")
    file = source if source.is_file() else source / "flax_model.msgpack"
    whole = file.read_bytes()
    for size in (*range(0, 200, 7), *range(200, 40_000, 2_999), len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        refused(source, tmp_path, str(file), "not a whole", "download it again")
    if form == "flax":
        file.write_bytes(whole + b"\0")
        refused(source, tmp_path, "1 bytes too many")


@pytest.mark.parametrize(
    "content", [b"", b"hello, this is text", b"\x00" * 64, b"PK\x03\x04" * 20, b"\x80", b"\xdf" * 9]
)
def test_a_file_of_another_kind(content, tmp_path):
    (tmp_path / "a.gguf").write_bytes(content)
    refused(tmp_path / "a.gguf", tmp_path, "a.gguf: not a whole GGUF file")
    foreign.copy_beside(TINY, tmp_path / "flax")
    (tmp_path / "flax/flax_model.msgpack").write_bytes(content)
    refused(tmp_path / "flax", tmp_path, str(tmp_path / "flax"))


def packed(tmp_path: Path, tree: dict) -> Path:
    foreign.copy_beside(TINY, tmp_path / "flax")
    (tmp_path / "flax/flax_model.msgpack").write_bytes(msgpack.packb(tree, strict_types=True))
    return tmp_path / "flax"


NORM = ("model", "norm", "weight")


def flax_tree(changed: tuple[str, ...] = (), value: object = None) -> dict:
    """tiny's tree, with `value` at the path `changed`; None takes it out."""
    tree = {}
    for name, tensor in foreign.tensors_of(TINY):
        path, array = foreign.flax_path(name, tensor)
        place = tree
        for module in path[:-1]:
            place = place.setdefault(module, {})
        place[path[-1]] = foreign.flax_leaf(array)
    place = tree
    for module in changed[:-1]:
        place = place.setdefault(module, {})
    if changed and value is None:
        del place[changed[-1]]
    elif changed:
        place[changed[-1]] = value
    return tree


def ext(shape, dtype: str, data: bytes, code: int = 1) -> msgpack.ExtType:
    return msgpack.ExtType(code, msgpack.packb((shape, dtype, data), use_bin_type=True))


def test_the_tree_of_the_next_test_is_right(tmp_path):
    import_checkpoint(packed(tmp_path, {"params": flax_tree()}), tmp_path / "imported")
    assert all(torch.equal(tensor, stored(TINY)[name]) for name, tensor in stored(tmp_path / "imported").items())


@pytest.mark.parametrize(
    "path, value, parts",
    [
        (NORM, None, ["norm.weight is missing;"]),
        (NORM, ext((4,), "bfloat16", bytes(8)), ["model/norm/weight has shape (4,)", "asks for (256,)"]),
        (NORM, ext((256,), "bfloat16", bytes(8)), ["not a whole", "8 bytes for an array of shape (256,)"]),
        (NORM, ext((256,), "int8", bytes(256)), ["'int8'", "'bfloat16' or 'float16' or 'float32'"]),
        (NORM, ext((256,), "bfloat16", bytes(512), 3), ["not a whole", "extension type 3"]),
        (NORM, 7, ["model/norm/weight is 7", "holds arrays"]),
        (NORM, {"__msgpack_chunked_array__": True, "shape": {"0": 256}, "chunks": {}}, ["not a whole chunked array"]),
        (("model", "extra", "kernel"), ext((2, 2), "float32", bytes(16)), ["model/extra/kernel is no tensor"]),
        (("step",), 3, ["step is 3", "holds arrays"]),
    ],
)  # fmt: skip
def test_a_flax_tree_that_is_another_models(path, value, parts, tmp_path):
    refused(packed(tmp_path, flax_tree(path, value)), tmp_path, *parts)


def test_a_flax_folder_that_is_not_whole(tmp_path):
    folder = foreign.write_flax(TINY, tmp_path / "flax", shards=3)
    (folder / "flax_model-00002-of-00003.msgpack").unlink()
    refused(folder, tmp_path, "flax_model-00002-of-00003.msgpack: missing, but")
    (folder / "flax_model.msgpack.index.json").write_text("{}")
    refused(folder, tmp_path, "not a weight index")
    (folder / "flax_model.msgpack.index.json").unlink()
    refused(folder, tmp_path, "neither flax_model.msgpack, flax_model.msgpack.index.json nor a .gguf file")
    (folder / "config.json").unlink()
    (folder / "flax_model.msgpack").write_bytes(b"")
    refused(folder, tmp_path, "no config.json there")
    refused(folder / "flax_model.msgpack", tmp_path, "pass a .gguf file, or the folder")


@pytest.mark.parametrize(
    "edit, change, parts",
    [
        (None, lambda n, d, k: None if n == "output_norm.weight" else (d, k), ["norm.weight is missing;"]),
        (None, lambda n, d, k: None if n == "token_embd.weight" else (d, k), ["token_embd.weight is missing"]),
        (None, lambda n, d, k: (d[:4], k) if n == "output_norm.weight" else (d, k), ["has shape (4,)", "for (256,)"]),
        (None, lambda n, d, k: (d[:60], k) if n == "blk.0.attn_k.weight" else (d, k), ["has shape (60, 256)"]),
        (
            None, lambda n, d, k: (d.astype(np.int32), gguf.GGMLQuantizationType.I32) if d.ndim == 1 else (d, k),
            ["attn_norm.weight is I32", "cannot read"],
        ),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(8, np.float32)), None, ["rope_freqs.weight scales RoPE"]),
        (lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(8, np.float32)), None, ["is no tensor of SmolLM3"]),
        (lambda w: w.add_expert_count(8), None, ["smollm3.expert_count is 8, which SmolLM3 does not have"]),
        (lambda w: w.add_value_length(32), None, ["smollm3.attention.value_length is not the 16 of a head"]),
        (lambda w: w.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16), None, ["one of 2 files", "--merge"]),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), None,
            ["rope_scaling.rope_type is 'longrope'", "supported is"],
        ),
    ],
)  # fmt: skip
def test_a_gguf_file_that_is_another_models(edit, change, parts, tmp_path):
    refused(foreign.write_gguf(TINY, tmp_path / "a.gguf", edit=edit, change=change), tmp_path, "a.gguf", *parts)


def test_a_gguf_file_of_another_architecture(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "a.gguf", tmp_path, "general.architecture is 'llama'", "'smollm3'")


def test_sources_and_folders_that_cannot_be(tmp_path):
    file = foreign.write_gguf(TINY, tmp_path / "a.gguf")
    shutil.copyfile(file, tmp_path / "b.gguf")
    refused(tmp_path, tmp_path, "2 GGUF files are there, name one of them: a.gguf, b.gguf")
    refused(tmp_path / "none", tmp_path, "no such file or folder")
    refused(TINY, tmp_path, "it holds safetensors, which need no import")
    (tmp_path / "refused").mkdir()
    (tmp_path / "refused/mine.txt").write_text("mine")
    refused(file, tmp_path, "there is something already")
    assert [path.name for path in (tmp_path / "refused").iterdir()] == ["mine.txt"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("smollm3_neuron.weights.imports.convert._write", full)
    refused(foreign.write_gguf(TINY, tmp_path / "a.gguf"), tmp_path, "No space left on device; nothing was written")


@pytest.mark.parametrize("missing, form", [("msgpack", "flax"), ("gguf", "gguf BF16")])
def test_a_parser_that_is_not_installed(missing, form, tmp_path, monkeypatch):
    source = FORMATS[form](TINY, tmp_path / "foreign")
    monkeypatch.setitem(sys.modules, missing, None)
    refused(source, tmp_path, f"the package {missing} is not installed", f"pip install {missing}")


# ---- the commands ----


def run(script: str, *args) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / f"scripts/{script}.py", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_command(tmp_path):
    file = foreign.write_gguf(TINY, tmp_path / "a.gguf", "Q8_0")
    done = run("import_checkpoint", file, tmp_path / "im ported")
    assert done.returncode == 0, done.stderr
    assert "2,625,792 parameters in 74 tensors" in done.stdout and "note: it was quantized (Q8_0)" in done.stdout
    assert f"python scripts/compile.py --model '{tmp_path}/im ported'" in done.stdout
    file.write_bytes(file.read_bytes()[:-1])
    done = run("import_checkpoint", file, tmp_path / "second")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "second").exists()


def test_compile_says_the_command(tmp_path):
    folder, file = foreign.write_flax(TINY, tmp_path / "flax"), tmp_path / "a.gguf"
    for source, command in ((folder, folder), (file, file), (folder / "flax_model.msgpack", folder)):
        done = run("compile", "--model", source, "--device", "cpu", "--output", tmp_path / "artifact")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert f"import it first: python scripts/import_checkpoint.py {command} FOLDER" in done.stderr
    with pytest.raises(SmolLM3Error, match="download a file and import it first: .* FILE.gguf FOLDER"):
        locate_model("ggml-org/SmolLM3-3B-GGUF")


def test_a_folder_with_both_is_read_as_safetensors(tmp_path):
    folder = foreign.write_flax(TINY, tmp_path / "flax")
    foreign.write_gguf(TINY, folder / "a.gguf")
    shutil.copyfile(TINY / "model.safetensors", folder / "model.safetensors")
    assert read_config(folder) == read_config(TINY)
    assert set(checkpoint_files(folder).values()) == {folder / "model.safetensors"}
