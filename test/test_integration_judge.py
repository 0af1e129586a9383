"""The judgement of the integration test in bfloat16: a right model passes every time, and each fault named here fails.

The checkpoints are `tiny`, a random one of 30 layers, and one of 30 layers whose vocabulary stands in pairs of tokens
with almost the same logits, so that near ties are frequent.
"""

import sys
from pathlib import Path

import pytest
import torch
from checkpoint_faults import config, copy, flip, replace, swap, tokens, weight
from places import MODEL, TINY
from reference import make_checkpoint
from transformers import AutoTokenizer
from uncompiled import load

DEEP = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_attention_heads=8, num_key_value_heads=4)
DEEP |= dict(num_hidden_layers=30, tie_word_embeddings=False)
CHECKPOINTS = ("tiny", "random", "pairs")
# of the distance of the two best logits, as shares of the 90% quantile: the 10% and the 50% quantile, at least and most
QUANTILES = {"random": ((0.03, 0.15), (0.25, 0.5)), "pairs": ((0.0, 0.002), (0.01, 0.25))}
RUNS = 50
# name -> (change of the config, change of the weights); the layer is one that every checkpoint has
FAULTS = {
    "a flipped NoPE flag": (flip(3), None),
    "K and V swapped": (None, swap((weight(2, "self_attn.k_proj"), weight(2, "self_attn.v_proj")))),
    "a scaled norm": (None, replace(weight(5, "post_attention_layernorm"), lambda w: w * 1.5)),
    "two layers' MLPs swapped": (None, swap((weight(1, "mlp.up_proj"), weight(4, "mlp.up_proj")))),
    "a negated projection": (None, replace(weight(6, "mlp.down_proj"), lambda w: -w)),
    "another theta": (config(rope_theta=100.0), None),
    "a head whose rows are one off": (
        config(tie_word_embeddings=False),
        lambda w: w.update({"lm_head.weight": w.get("lm_head.weight", w["model.embed_tokens.weight"]).roll(1, 0)}),
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    random = Path(make_checkpoint(folder / "random", **DEEP))
    small = torch.rand(64, 1, generator=torch.Generator().manual_seed(3)).mul(-6).exp()  # 1 to 1/400

    def in_pairs(head):
        first, difference = head.view(64, 2, 64).unbind(1)
        return torch.stack([first, first + difference * small * 0.3], 1).flatten(0, 1)

    pairs = copy(random, folder / "pairs", None, replace("lm_head.weight", in_pairs))
    return {"tiny": TINY, "random": random, "pairs": pairs}


@pytest.fixture(scope="module")
def judged(checkpoints):
    """judged(name, app, run) -> the report of that run's prompts; AssertionError for what the integration test fails"""
    from smollm3_neuron.machine.runtime import ensure_neuronx

    ensure_neuronx()
    sys.path.append(str(MODEL / "test/integration"))
    import test_model

    from smollm3_neuron.check.validation import Case, Reference, prompts_and_text

    references = {name: Reference(folder, torch.bfloat16) for name, folder in checkpoints.items()}
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    texts = prompts_and_text(TINY)[0]

    def judge(name: str, app, run: int, count: int = 2):
        if name == "tiny":
            chosen = [texts[(run * count + number) % len(texts)] for number in range(count)]
            cases = [Case("prompt", text, ids) for text, ids in zip(chosen, tokenizer(chosen)["input_ids"])]
        else:
            cases = [
                Case("prompt", f"run {run}", tokens(4 + (run + number) % 20, 7 * run + number))
                for number in range(count)
            ]
        text = tokens(16, run)
        cases.append(Case("text", "text", text[:1], text[1:]))
        return test_model.assert_right(app, references[name], cases, tokenizer, new_tokens=8)

    return judge


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_right_model_passes_every_time(name, judged, checkpoints, tmp_path):
    apps = [load(checkpoints[name], tmp_path / str(tp), "bfloat16", tp_degree=tp, batch_size=2)[0] for tp in (1, 2)]
    reports = [judged(name, apps[run % 2], run) for run in range(RUNS)]
    verdicts = [report.verdict for report in reports]
    margins = torch.tensor([m for report in reports for one in report.cases for m in one.expected_margins])
    low, middle, high = margins.double().quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.double)).tolist()
    print(f"{name}: {RUNS} of {RUNS}, near ties in {verdicts.count('near tie')}; {low:.3g} {middle:.3g} {high:.3g}")
    if name in QUANTILES:
        for share, (least, most) in zip((low / high, middle / high), QUANTILES[name]):
            assert least <= share <= most


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS[1:])])
def test_a_fault_fails(name, fault, judged, checkpoints, tmp_path):
    folder = copy(checkpoints[name], tmp_path / "copy", *FAULTS[fault])
    app, _ = load(folder, tmp_path / "weights", "bfloat16", batch_size=2)
    with pytest.raises(AssertionError, match="logits of the top|another token|perplexity"):
        judged(name, app, 0)
