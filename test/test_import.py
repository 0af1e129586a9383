"""scripts/import_checkpoint.py: Flax and GGUF checkpoints become the safetensors that they were made from."""

import json
import shutil
from pathlib import Path

import foreign
import gguf
import numpy as np
import pytest
import torch
from places import TINY
from reference import make_checkpoint, reference_tokens, tiny_eos, tiny_prompts
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, SmolLM3ForCausalLM

from smollm3_neuron.artifact.build import compile_artifact
from smollm3_neuron.artifact.settings import Settings
from smollm3_neuron.generate.generation import generate
from smollm3_neuron.machine.runtime import ensure_neuronx
from smollm3_neuron.model.config import read_config
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
PROMPTS = (
    "The square root of 144 is",
    "1+1=",
    "12345  don't\n\n  stop<think>x</think><|im_end|> ä 漢字 🚀",
    "zqzq x_ab , ab .",
)


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
    assert read_config(output) == read_config(source)
    assert torch.equal(logits(output), logits(source))


@pytest.mark.parametrize("name", ["tiny", "plain"])
@pytest.mark.parametrize("form", ["flax, 3 files", "gguf BF16"])
def test_an_artifact_of_an_import_gives_transformers_tokens(form, name, checkpoints, tmp_path):
    ensure_neuronx()
    import_checkpoint(FORMATS[form](checkpoints[name], tmp_path / "foreign"), tmp_path / "imported")
    settings = Settings(tp_degree=2, seq_len=64, batch_size=2, torch_dtype="float32")
    model = compile_artifact(tmp_path / "imported", tmp_path / "artifact", settings, "cpu").load()
    prompts = tiny_prompts()[-2:] if name == "tiny" else [list(range(7, 12)), list(range(60, 77))]
    answers = generate(model, prompts, 24, suppress_tokens=tiny_eos())
    expected = [reference_tokens(checkpoints[name], tuple(prompt), 24, tiny_eos()) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected


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
    """Random blocks in the place of the embedding and a layer's queries; `scales`: where their float16 values lie."""
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
    lines = ["The square root of 144 is 12, don't stop.", "12345 123456 1234567", "\n\n  ab \n\n x_ab x_ab x_ab"] * 3
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    values = json.loads(tokenizer.to_str())
    values["model"]["vocab"]["zqzq"] = tokenizer.get_vocab_size()  # no merge leads to it
    tokenizer = Tokenizer.from_str(json.dumps(values))
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
    assert read_config(tmp_path / "from the folder").no_rope_layers == [1, 0] * 4
    assert read_config(tmp_path / "from the file").no_rope_layers == [1, 1, 1, 0] * 2
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        assert (tmp_path / "from the folder" / name).read_bytes() == (source / name).read_bytes()
