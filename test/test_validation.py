"""What validate.py and inspect_layers.py judge: faults are called wrong and found, harmless changes are not.

The models run uncompiled, over shard files of their own (uncompiled.py); test_commands.py runs the commands.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoint_faults import BASES, FAULTS, PROMPTS, QUERIES, SEQ_LEN, SMALL, copy, replace, tokens
from places import TINY
from reference import make_checkpoint
from safetensors.torch import load_file, save_file
from uncompiled import load


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: Path(make_checkpoint(folder / name, **SMALL, **changes)) for name, changes in BASES.items()}


@pytest.fixture(scope="session")
def judge(bases):
    """judge(app, base name, dtype) -> Report; one reference per base."""
    from smollm3_neuron.check.validation import Case, Reference, validate

    text = tokens(20, 5)
    cases = [*(Case("prompt", str(p), p) for p in PROMPTS), Case("text", "text", text[:1], text[1:])]
    reference = cache(lambda base, dtype: Reference(bases[base], dtype))
    return lambda app, base, dtype=torch.float32: validate(app, reference(base, dtype), cases, 6)


def check_wrong(app, ranks, base, bases, judge, first):
    from smollm3_neuron.check.inspection import inspect
    from smollm3_neuron.check.validation import WRONG

    assert judge(app, base).verdict == WRONG
    found = inspect(app, bases[base], PROMPTS[2], ranks)
    assert found.first == first and not found.is_right
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_wrong_and_found(name, bases, judge, tmp_path):
    base, change_config, change_weights, first = FAULTS[name]
    folder = copy(bases[base], tmp_path / "copy", change_config, change_weights)
    check_wrong(*load(folder, tmp_path / "weights"), base, bases, judge, first)


def test_there_are_enough_faults():
    assert len(FAULTS) >= 30


def test_an_inverted_schedule_disagrees_with_the_config(bases, judge, tmp_path):
    folder = copy(bases["plain"], tmp_path / "copy", FAULTS["inverted schedule"][1])
    found = check_wrong(*load(folder, tmp_path / "weights"), "plain", bases, judge, (0, QUERIES))
    assert found.disagreeing == [0, 1, 2, 3, 4] and found.rope_of_config == [True, True, True, False, True]


@pytest.mark.parametrize("stale", [1, "exchanged"])
def test_a_stale_shard_is_wrong(stale, bases, judge, tmp_path):
    load(bases["plain"], tmp_path / "weights", tp_degree=2)
    files = [tmp_path / f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in range(2)]
    if stale == "exchanged":
        swapped = [file.read_bytes() for file in reversed(files)]
        for file, content in zip(files, swapped):
            file.write_bytes(content)
    else:
        other = copy(bases["plain"], tmp_path / "other", None, lambda w: w.update({n: t * 1.001 for n, t in w.items()}))
        load(other, tmp_path / "of_other", tp_degree=2)
        shutil.copyfile(tmp_path / f"of_other/{files[stale].name}", files[stale])
    from nxd_cpu_compiler.eager_ranks import EagerRanks
    from smollm3_neuron.artifact.build import build_config
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM

    built = build_config(bases["plain"], Settings(tp_degree=2, seq_len=SEQ_LEN, torch_dtype="float32"))
    app = NeuronSmolLM3ForCausalLM(str(bases["plain"]), built)
    check_wrong(app, EagerRanks(app, tmp_path / "weights"), "plain", bases, judge, (0, "layer_input"))


# ---- what is harmless: name -> (base, how the checkpoint is written again, settings) ----


def in_one_file_too(folder, out):
    """Float32 values in float32, as they are, with the tied head written out."""
    return copy(folder, out, None, lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))


def in_several_files(folder, out):
    out.mkdir()
    shutil.copyfile(folder / "config.json", out / "config.json")
    weights, weight_map = load_file(folder / "model.safetensors"), {}
    for part in range(3):
        names = sorted(weights)[part::3]
        file = f"model-0000{part + 1}-of-00003.safetensors"
        save_file({name: weights[name] for name in names}, out / file)
        weight_map |= dict.fromkeys(names, file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return out


def as_transformers_5(config):
    parameters = {"rope_theta": config.pop("rope_theta"), **(config.pop("rope_scaling") or {"rope_type": "default"})}
    config.update(rope_parameters=parameters, dtype=config.pop("torch_dtype", config.get("dtype")))


HARMLESS = {
    "nothing": ("plain", None, {}),
    "TP 2": ("plain", None, dict(tp_degree=2)),
    "TP 3, heads expanded": ("plain", None, dict(tp_degree=3)),
    "TP 8, heads replicated": ("plain", None, dict(tp_degree=8)),
    "fused QKV": ("biases", None, dict(fused_qkv=True, tp_degree=2)),
    "MLPs padded with zeros": ("biases", None, dict(padded_intermediate_size=128, tp_degree=2)),
    "buckets": (
        "plain", None,
        dict(enable_bucketing=True, context_encoding_buckets=[8, SEQ_LEN], token_generation_buckets=[16, 32, SEQ_LEN]),
    ),
    "a batch": ("plain", None, dict(batch_size=3)),
    "another place in a batch, a row free": ("plain", None, dict(batch_size=2)),
    "continuous batching": ("plain", None, dict(is_continuous_batching=True, batch_size=3)),
    "a shorter context": ("plain", None, dict(max_context_length=40)),
    "a longer cache": ("window", None, dict(seq_len=64)),
    "one file, head written out": ("plain", in_one_file_too, {}),
    "several files": ("untied", in_several_files, {}),
    "the config as transformers 5 writes it": ("yarn", lambda f, out: copy(f, out, as_transformers_5), {}),
    "the schedule left out": ("plain", lambda f, out: copy(f, out, lambda c: c.update(no_rope_layers=None)), {}),
    "windows, TP 2, a batch": ("window", None, dict(tp_degree=2, batch_size=3)),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_change_is_not_wrong(name, bases, judge, tmp_path):
    from smollm3_neuron.check.inspection import inspect
    from smollm3_neuron.check.validation import WRONG

    base, again, settings = HARMLESS[name]
    folder = again(bases[base], tmp_path / "copy") if again else bases[base]
    app, ranks = load(folder, tmp_path / "weights", **settings)
    report = judge(app, base)
    assert report.verdict != WRONG, [case.reason for case in report.cases]
    found = inspect(app, folder, PROMPTS[2], ranks)
    assert found.is_right, (found.first, found.disagreeing, found.broken_identity)


def test_the_values_are_transformers_own(bases, tmp_path):
    """What hooks on transformers' whole model see is what comes back as the reference's, and the model's is close."""
    from smollm3_neuron.check.inspection import ROWS, inspect, named_values
    from smollm3_neuron.check.reference import load_reference

    app, ranks = load(bases["plain"], tmp_path / "weights", tp_degree=2)
    found, prompt, layers = inspect(app, bases["plain"], PROMPTS[1], ranks), PROMPTS[1], [1, 3]
    own, theirs = (named_values(values, prompt, layers) for values in (found.values, found.reference))
    model, seen = load_reference(bases["plain"]), {}

    def keep(name, of_input=False):
        return lambda module, args, output: seen.update({name: args[0] if of_input else output})

    for layer in layers:
        part = model.model.layers[layer]
        part.self_attn.o_proj.register_forward_hook(keep(f"layers.{layer}.premix", of_input=True))
        part.mlp.register_forward_hook(keep(f"layers.{layer}.mlp_output"))
        part.mlp.register_forward_hook(keep(f"layers.{layer}.mlp_input", of_input=True))
    model.model.embed_tokens.register_forward_hook(keep("token_embeddings"))
    with torch.no_grad():
        model(torch.tensor([[*prompt, *[0] * (-len(prompt) % ROWS)]]))
    for name, value in seen.items():
        value = value[0, : len(prompt)]
        if name.endswith("premix"):
            value = value.unflatten(-1, (8, -1)).transpose(0, 1)
        assert torch.equal(theirs[name], value), name
        assert torch.allclose(own[name], value, atol=1e-5), name
    assert own["input_ids"].tolist() == prompt and own["input_size"].tolist() == [len(prompt)]
    assert not [name for name in own if name.startswith("layers.") and name.split(".")[1] not in ("1", "3")]
    assert found.spacing_keeps_first == [True] * 5
    assert [size > 0 for size in found.spacing_sizes] == found.rope_of_spacing == [True, True, True, False, True]


@pytest.mark.parametrize("dtype, ulp", [(torch.float32, 2**-23), (torch.bfloat16, 2**-7)])
def test_a_value_may_be_off_by_what_inspection_says(dtype, ulp):
    """Four times transformers' largest error and four units in the last place, as shares of the largest element."""
    from smollm3_neuron.check.inspection import compared

    key, exact = (0, "layer_input"), torch.tensor([1.0, -8.0, float("-inf")])
    theirs = exact + torch.tensor([0.008, 0.0, 0.0])
    for times, wrong in ((0.99, False), (1.01, True)):
        allowed = 4 * 0.001 + 4 * ulp
        ours = exact + torch.tensor([0.0, times * allowed * 8, 0.0])
        (difference,) = compared({key: ours}, {key: theirs}, {key: exact}, dtype).values()
        assert difference.tolerance == pytest.approx(allowed, rel=1e-4) and difference.is_wrong == wrong


def test_the_inspection_of_a_right_model_says_right_whatever_the_prompt(tmp_path):
    """A CPU rounds a product of few rows less: transformers' error must be measured with as many."""
    from transformers import AutoTokenizer

    from smollm3_neuron.check.inspection import inspect

    app, ranks = load(TINY, tmp_path / "weights", seq_len=64)
    prompts = ["The square root of 144 is", "7 * 8 = and 3", "Water boils at", "1+1="]
    for prompt in AutoTokenizer.from_pretrained(TINY)(prompts)["input_ids"]:
        found = inspect(app, TINY, prompt, ranks)
        assert found.is_right, (prompt, found.first)
        largest = max(d.error / d.tolerance for d in found.differences.values() if d.tolerance)
        assert largest < 0.7, "the measure explains the error, not only covers it"


def test_a_float32_file_of_bfloat16_values_is_the_bfloat16_file(bases, tmp_path):
    from smollm3_neuron.check.validation import WRONG, Case, Reference, validate

    half = copy(bases["plain"], tmp_path / "half", None, lambda w: w.update({n: t.bfloat16() for n, t in w.items()}))
    full = copy(half, tmp_path / "full", None, lambda w: w.update({n: t.float() for n, t in w.items()}))
    for dtype in ("float32", "bfloat16"):
        app, _ = load(full, tmp_path / dtype, dtype)
        report = validate(app, Reference(half, getattr(torch, dtype)), [Case("prompt", "", PROMPTS[1])], 6)
        assert report.verdict != WRONG, report.cases[0].reason


@pytest.mark.parametrize(
    "quantization_type, quantization_dtype",
    [
        ("per_tensor_symmetric", "int8"),
        ("per_channel_symmetric", "int8"),
        ("per_channel_symmetric", "f8e4m3"),
    ],
)
def test_8_bit_weights_are_judged_by_what_they_stand_for(quantization_type, quantization_dtype, bases, tmp_path):
    """The shards of a quantized artifact, each value times its scale, run as whole weights.

    They are right beside transformers with the same settings, and wrong beside the checkpoint.
    """
    from smollm3_neuron.artifact.build import build_config
    from smollm3_neuron.artifact.settings import Settings
    from smollm3_neuron.check.validation import IDENTICAL, WRONG, Case, Reference, validate
    from smollm3_neuron.weights.shard_writer import write_shards

    app, ranks = load(bases["plain"], tmp_path / "whole")
    of_8_bits = {"quantized": True, "quantization_type": quantization_type, "quantization_dtype": quantization_dtype}
    settings = Settings(tp_degree=1, seq_len=SEQ_LEN, torch_dtype="float32", **of_8_bits)
    config = build_config(bases["plain"], settings)
    write_shards(bases["plain"], config.checkpoint_config, config.neuron_config, tmp_path / "quantized")
    (file,) = (tmp_path / "quantized").iterdir()
    shard = load_file(file)
    scales = {name.replace("scale", "weight"): shard.pop(name) for name in list(shard) if name.endswith(".scale")}
    assert len(scales) > 20
    shard = {name: tensor.float() * scales[name] if name in scales else tensor for name, tensor in shard.items()}
    (tmp_path / "standing").mkdir()
    save_file(shard, tmp_path / "standing" / file.name)
    type(ranks)(app, tmp_path / "standing")
    cases = [Case("prompt", "", PROMPTS[1])]
    verdicts = [
        validate(app, Reference(bases["plain"], torch.float32, quantized=quantized), cases, 6).verdict
        for quantized in (settings, None)
    ]
    assert verdicts == [IDENTICAL, WRONG]


@pytest.mark.parametrize("tp_degree", [1, 2, 8])
def test_bfloat16_of_float32_weights_is_a_near_tie_at_most(tp_degree, bases, judge, tmp_path):
    from smollm3_neuron.check.validation import IDENTICAL, NEAR_TIE

    app, _ = load(bases["plain"], tmp_path / "weights", "bfloat16", tp_degree=tp_degree)
    report = judge(app, "plain", torch.bfloat16)
    assert report.verdict in (IDENTICAL, NEAR_TIE), [case.reason for case in report.cases]


def test_a_reference_that_lacks_a_weight_is_none(bases, tmp_path):
    """The package reads a head under either name, transformers under one: it would be random."""
    from smollm3_neuron.check.reference import load_reference
    from smollm3_neuron.errors import SmolLM3Error

    def rename(weights):
        weights["model.lm_head.weight"] = weights.pop("lm_head.weight")

    folder = copy(bases["untied"], tmp_path / "copy", None, rename)
    with pytest.raises(SmolLM3Error, match="transformers finds no lm_head.weight there"):
        load_reference(folder)
    load_reference(bases["untied"]), load_reference(bases["plain"])


def test_tolerances_that_are_none_are_refused():
    from smollm3_neuron.check.validation import parse_tol_map
    from smollm3_neuron.errors import SmolLM3Error

    assert parse_tol_map({"5": 0.01, "all": 0.05}) == {"5": 0.01, "all": 0.05}
    for values in ({"7": 0.1}, {"5": "a"}, {"5": -1}, {}, [0.1]):
        with pytest.raises(SmolLM3Error, match="tol_map"):
            parse_tol_map(values)


def test_what_parts_on_a_tie_is_a_near_tie_and_beyond_it_wrong(bases, tmp_path):
    """Two rows of the head that are a rounding apart; the model, else right, prefers the other one."""
    from smollm3_neuron.check.validation import NEAR_TIE, WRONG, Case, Reference, validate

    ((answer, _),) = Reference(bases["untied"], torch.float32).answers([PROMPTS[1]], [[0] * 6])
    first = answer[0]
    other = (first + 1) % 128
    folder = copy(
        bases["untied"],
        tmp_path / "copy",
        None,
        replace("lm_head.weight", lambda w: w.index_copy(0, torch.tensor([other]), w[[first]] * (1 - 5e-7))),
    )
    app, ranks = load(folder, tmp_path / "weights")
    reference, run = Reference(folder, torch.float32), ranks.run

    def verdict(lift: float):
        def lifted(*args):
            logits = run(*args).clone()
            logits[..., other] += lift * logits.abs().max()
            return logits

        ranks.run = lifted
        return validate(app, reference, [Case("prompt", "", PROMPTS[1])], 6)

    report = verdict(1.1e-6)
    (judged,) = report.cases
    assert report.verdict == NEAR_TIE and "parts at token 0" in judged.reason, judged.reason
    assert (judged.tokens[0], judged.expected[0]) == (other, first) and judged.divergence == 0
    assert judged.margins[0] < 1e-4 and judged.expected_margins[0] < 1e-4
    assert verdict(1e-3).verdict == WRONG


def test_a_float64_rotation_is_judged_beside_the_same(tmp_path):
    """At position 1,000 float32's angles are off by more than float32's products are."""
    from smollm3_neuron.check.inspection import inspect
    from smollm3_neuron.check.validation import IDENTICAL, WRONG, Case, Reference, validate

    folder = Path(make_checkpoint(tmp_path / "long", **SMALL, max_position_embeddings=1024, num_hidden_layers=3))
    app, ranks = load(folder, tmp_path / "weights", seq_len=1024, rope_precision="float64")
    cases = [Case("prompt", "", [token % 128 for token in tokens(1000, 3)])]
    verdicts = [
        validate(app, Reference(folder, torch.float32, rope_table=table), cases, 4).verdict for table in (1024, None)
    ]
    assert verdicts == [IDENTICAL, WRONG]
    assert inspect(app, folder, cases[0].prompt, ranks).is_right
