"""Train `tiny`, the small SmolLM3 checkpoint on which this project proves token equality.

It has SmolLM3-3B's architecture at 2.6 M parameters, and is trained on generated arithmetic until every greedy choice
is sharp: a port that differs from transformers by rounding alone must give the same tokens. A document opens with a
prompt in the phrasing of the published ones ("1+1=", "The square root of 144 is") and goes on by counting one operand
up. A part of the sums and products, chosen by a hash of the operands, is never shown in training: whoever answers
those has computed, not remembered.

The folder written holds the model in bf16, its tokenizer and chat template, and `prompts.json` with what to ask it.

    python tools/train_tiny.py --minutes 35
"""

import argparse
import hashlib
import json
import math
import os
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, SmolLM3Config, SmolLM3ForCausalLM

TINY = Path(__file__).resolve().parents[1] / "contrib/models/SmolLM3-3B/test/tiny"
TEMPLATE = (TINY / "chat_template.jinja").read_text()  # written by hand, kept in the folder
BOS, PAD, _, EOS = SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
VOCAB = 512
CONTEXT = 96

INSTRUCTIONS = "", "Answer with one equation.", "You add numbers and show the working.", "Be brief and exact."
PUBLISHED = "The square root of 144 is", "1+1=", "2+2=", "12 times 12 equals", "What is 3+4?", "7 * 8 =", "9 * 9 ="
OPEN_ENDED = "Water boils at", "The capital of France is", "def fibonacci(n):", "The chemical formula for water is"
# The arithmetic has too few words for 512 tokens: this fills the tokenizer's vocabulary up. No document holds it.
ENGLISH = """The quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the evil queen. When
the weather is fine, we would rather go out and look at the stars than sit here and read about them. Every morning the
children walk along the river to their school, and in the evening they return with stories of what they have found.
import json\nfrom pathlib import Path\n\ndef get_weather(city: str, unit="celsius") -> dict:\n    return {city: unit}"""


@dataclass(frozen=True)
class Kind:
    """One way to put an operation into words, and the operands that a document of it starts with."""

    op: str
    prompt: str
    answer: str
    a: Sequence[int]
    b: Sequence[int]
    weight: int
    stops: float = 0.0  # share of the documents that end, with EOS, after their first answer

    def line(self, a, b):
        c = {"+": a + b, "*": a * b, "root": b}[self.op]
        return self.prompt.format(a=a, b=b, square=b * b), self.answer.format(c)


FIFTY, TABLE = range(1, 51), range(1, 13)
SUM = Kind("+", "{a}+{b}=", "{}\n", FIFTY, FIFTY, weight=4)
KINDS = (
    SUM,
    Kind("+", "{a} plus {b} equals", " {}.\n", FIFTY, FIFTY, weight=3),
    Kind("+", "What is {a}+{b}?", " {}\n", FIFTY, FIFTY, weight=3, stops=0.7),
    Kind("*", "{a} * {b} =", " {}\n", TABLE, TABLE, weight=2),
    Kind("*", "{a} times {b} equals", " {}.\n", TABLE, TABLE, weight=2),
    Kind("*", "{a} * {b} =", " {}\n", (2, 10), FIFTY, weight=1),
    Kind("*", "{a} times {b} equals", " {}.\n", (2, 10), FIFTY, weight=1),
    Kind("root", "The square root of {square} is", " {}.\n", (0,), range(1, 21), weight=1),
)
LINES = 12  # a document's longest count


def held_out(op, a, b):
    """Whether a + b or a * b, in either order, is kept out of training: only what a rule can answer, no times table."""
    low, high = sorted((a, b))
    digest = hashlib.sha256(f"{low} {op} {high}".encode()).digest()[0]
    if op == "+":  # not the small and round numbers: the working in other answers is made of them
        return low > 10 and low % 10 > 0 and high % 10 > 0 and digest % 12 == 0
    return op == "*" and low in (2, 10) and high > 12 and digest % 6 == 0


def count_up(rng, kind):
    """(a, b), (a, b + 1), ...: some pairs, ending before the first that is held out."""
    a, b = rng.choice(kind.a), rng.choice(kind.b)
    pairs = [(a, n) for n in range(b, b + rng.randint(1, LINES))]
    return list(takewhile(lambda pair: not held_out(kind.op, *pair), pairs)) or count_up(rng, kind)


def plain_document(rng):
    kind = rng.choices(KINDS, [kind.weight for kind in KINDS])[0]
    (prompt, answer), *others = [kind.line(*pair) for pair in count_up(rng, kind)]
    if rng.random() < kind.stops:
        return prompt, answer.rstrip() + EOS
    return prompt, answer + "".join(map("".join, others))


def chat_document(rng, template):
    pairs = count_up(rng, SUM)
    (a, b), thinking = pairs[0], rng.random() < 0.5
    question = [{"role": "user", "content": f"What is {a}+{b}?"}]
    how = {"enable_thinking": thinking, "custom_instructions": rng.choice(INSTRUCTIONS)}
    prompt = template.render(messages=question, add_generation_prompt=True, **how)
    lines = ["".join(SUM.line(*pair)) for pair in pairs]
    # Some go on counting, so that the text stays sharp where EOS is barred.
    reply = lines[0].rstrip() + EOS if rng.random() < 0.7 else "".join(lines)
    return prompt, (f"<think>\n{working(a, b)}\n</think>\n" if thinking else "") + reply


def working(a, b):
    """Ones, tens, total. For 23+45: "3+5=8, 20+40=60, 60+8=68"."""
    (a10, a1), (b10, b1) = divmod(a, 10), divmod(b, 10)
    ones, tens = a1 + b1, 10 * (a10 + b10)
    return f"{a1}+{b1}={ones}, {10 * a10}+{10 * b10}={tens}, {tens}+{ones}={a + b}"


def documents(seed):
    """Endless (prompt, completion) pairs, the same for the same seed."""
    rng, template = random.Random(seed), jinja2.Template(TEMPLATE)
    while True:
        yield chat_document(rng, template) if rng.random() < 0.2 else plain_document(rng)


def prompts():
    """What tests ask: the published phrasing, pairs that training never showed, and text it knows nothing of."""
    rng, asked = random.Random(0), []
    for kind in KINDS:
        pairs = [(a, b) for a in kind.a for b in kind.b if held_out(kind.op, a, b)]
        for a, b in sorted(rng.sample(pairs, min(10, len(pairs)))):
            prompt, answer = kind.line(a, b)
            asked.append({"prompt": prompt, "answer": answer.strip(" .\n")})
    return {"published": PUBLISHED, "held_out": asked, "open_ended": OPEN_ENDED}


def build_tokenizer(seed):
    by_digit, by_byte = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([by_digit, by_byte]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(ADDED), special_tokens=SPECIAL, initial_alphabet=by_byte.alphabet(), show_progress=False
    )
    corpus = ["".join(document) for document in islice(documents(seed), 4000)] + [ENGLISH]
    # Encoding cuts added tokens out before it merges; so must the text that the merges are learned from.
    bpe.train_from_iterator((part for text in corpus for part in re.split(r"<\S*?>", text)), trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    assert bpe.get_vocab_size() == VOCAB
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False, model_max_length=4096
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_config(tokenizer):
    bos, pad, eos = tokenizer.convert_tokens_to_ids([BOS, PAD, EOS])
    return SmolLM3Config(
        architectures=["SmolLM3ForCausalLM"],
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rope_theta=5000000.0,
        no_rope_layers=[1, 1, 1, 0, 1, 1, 1, 0],
        bos_token_id=bos,
        pad_token_id=pad,
        eos_token_id=eos,
        use_cache=False,
        max_window_layers=28,
        pretraining_tp=2,
    )


def save(model, tokenizer, out):
    """Write the folder beside its place, then move it in file by file: no reader meets half a file."""
    out.mkdir(parents=True, exist_ok=True)
    # The 3B's field names: transformers 4.57 itself would write `dtype`, and leave out what is tied by default.
    config = model.config.to_diff_dict() | {"tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    config.pop("dtype", None)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # The state dict is cast, not the model: `model.to(bfloat16)` would also round the rotary frequencies.
    weights = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    with tempfile.TemporaryDirectory(dir=out.parent) as temporary:
        folder = Path(temporary)
        tokenizer.save_pretrained(folder)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        GenerationConfig(**ids, do_sample=True, temperature=0.6, top_p=0.95).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        (folder / "prompts.json").write_text(json.dumps(prompts(), indent=1) + "\n")
        for file in folder.iterdir():
            file.chmod(0o644)
            os.replace(file, out / file.name)


def batches(source, tokenizer, rows):
    """Rows filled with documents. Only completions are learned: nothing could foretell a prompt's operands."""
    while True:
        ids, labels = [], []
        for _ in range(rows):
            row, targets = [], []
            while len(row) < CONTEXT:
                prompt, completion = (tokenizer(text).input_ids for text in next(source))
                row += prompt + completion
                targets += [-100] * len(prompt) + completion
            ids.append(row[:CONTEXT])
            labels.append(targets[:CONTEXT])
        yield {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def train(model, data, steps, seconds, lr=2e-3, warmup=100):
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    began, step, done, mean = time.monotonic(), 0, 0.0, None
    while done < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warmup, 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**next(data), use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        # Whichever runs out first, the steps or the time, ends the schedule at its lowest rate.
        done = max(step / steps, (time.monotonic() - began) / seconds)
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step % 50 == 0 or done >= 1.0:
            print(f"step {step}  loss {mean:.4f}  {(time.monotonic() - began) / step:.3f} s/step", flush=True)
    return mean


def greedy(model, tokenizer, texts, new_tokens=32):
    """Greedy tokens with EOS barred, one row a text, and each row's smallest margin between its best two logits."""
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    how = GenerationConfig(max_new_tokens=new_tokens, suppress_tokens=[tokenizer.eos_token_id])
    how.update(pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True, output_scores=True)
    # By default the folder's own generation config, which samples, would win over this one.
    out = model.generate(batch.input_ids, how, attention_mask=batch.attention_mask, use_model_defaults=False)
    best = torch.stack(out.scores, dim=1).topk(2).values
    return out.sequences[:, -new_tokens:], (best[..., 0] - best[..., 1]).amin(dim=1)


def load(folder, **overrides):
    config = SmolLM3Config.from_pretrained(folder, **overrides)
    return SmolLM3ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()


def judge(folder):
    """(share of held-out answers right, smallest margin, share of tokens kept with the NoPE schedule inverted)"""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    inverted = load(folder, no_rope_layers=[1 - rope for rope in model.config.no_rope_layers])
    asked = json.loads((Path(folder) / "prompts.json").read_text())
    answers = {item["prompt"]: item["answer"] for item in asked["held_out"]}
    texts = [*asked["published"], *answers]
    tokens, margins = greedy(model, tokenizer, texts)
    replies = dict(zip(texts, tokenizer.batch_decode(tokens), strict=True))
    wrong = [text for text in answers if not re.match(rf" ?{answers[text]}(?!\d)", replies[text])]
    for text in wrong + [texts[i] for i in margins.argsort()[:5]]:
        print(f"{margins[texts.index(text)]:6.2f}  {text!r} -> {replies[text]!r}")
    kept = (tokens == greedy(inverted, tokenizer, texts)[0]).float().mean().item()
    return 1 - len(wrong) / len(answers), margins.min().item(), kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=TINY, metavar="DIR")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=35.0, help="end the training within this wall-clock time")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(args.seed)
    model = SmolLM3ForCausalLM(build_config(tokenizer))
    model.set_attn_implementation("eager")  # at this size faster than sdpa in training
    loss = train(model, batches(documents(args.seed), tokenizer, rows=32), args.steps, 60 * args.minutes)
    save(model, tokenizer, args.output)
    answered, margin, kept = judge(args.output)
    print(f"parameters                     {model.num_parameters():,}")
    print(f"loss                           {loss:.4f}")
    print(f"held-out answers right         {answered:.1%}")
    print(f"smallest margin                {margin:.2f}")
    print(f"tokens kept, schedule inverted {kept:.1%}")


if __name__ == "__main__":
    main()
