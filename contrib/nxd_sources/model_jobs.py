# SPDX-License-Identifier: Apache-2.0
"""What is done with the model, whichever library stands behind its imports.

A job is a dict: "name", "kind" (`generate`, `answer`, `serve`, `share`, `cost` or `shard`), "checkpoint", "neuron"
(NeuronConfig's keywords), and for generate: "prompts" (token ids; they go in batches of the config's batch_size, right
padded), "new_tokens", and optionally "sampling_params" (top_k, top_p, temperature per row), "adapter_ids" (per row),
"barred" (tokens never chosen), "forced" (per prompt the tokens to feed instead of the model's own choice), "logits"
(keep them: OUT/NAME.npz holds one [steps, vocabulary] array per prompt); for answer the first two and optionally
"drafts", per prompt what steps of the config's speculation_length verify in the place of what is looked up; for serve:
"prompts", and of each request its "lines" of the cache, the step it "comes" at, how many tokens it "stays", and
optionally the steps that it "rests"; for share, which is prefix caching: "prompts" and "new_tokens"; for shard: "keep"
(the files). With "draft", the checkpoint that guesses, the model is built with it.
"""

import hashlib
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode


def build_config(model_cls, job):
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    options = {"on_cpu": job["kind"] != "shard", "torch_dtype": "float32", **job["neuron"]}
    options["torch_dtype"] = getattr(torch, options["torch_dtype"])
    options.setdefault("max_context_length", options["seq_len"])
    config_cls = model_cls.get_config_cls()

    def of(checkpoint, options, **more):
        neuron_config = config_cls.get_neuron_config_cls()(**options)
        return config_cls(neuron_config, load_config=load_pretrained_config(checkpoint), **more)

    if "draft" not in job:
        return of(job["checkpoint"], options)
    from neuronx_distributed_inference.models.config import FusedSpecNeuronConfig

    draft_config = of(job["draft"], {**options, "enable_fused_speculation": False, "speculation_length": 0})
    fused_spec_config = FusedSpecNeuronConfig(
        model_cls._model_cls, draft_config=draft_config, draft_model_path=job["draft"]
    )
    return of(job["checkpoint"], options, fused_spec_config=fused_spec_config)


def build(model_cls, job):
    return model_cls(job["checkpoint"], build_config(model_cls, job))


def generate_batch(model, job, prompts, forced):
    """Greedy tokens and logits of one batch, each as [row][step]. Calls the model as NxDI's own adapter would."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
    width = int(lengths.max())
    input_ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    mask = (torch.arange(width) < lengths).long()
    positions = torch.arange(width).expand(len(prompts), width).masked_fill(mask == 0, 1)
    tokens, logits = [], []
    model.reset()
    for step in range(job["new_tokens"]):
        output = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            seq_ids=torch.arange(len(prompts)),
            sampling_params=torch.tensor(job["sampling_params"][: len(prompts)]) if "sampling_params" in job else None,
            adapter_ids=torch.tensor(job["adapter_ids"][: len(prompts)]) if "adapter_ids" in job else None,
        )
        if job["neuron"].get("on_device_sampling_config"):
            tokens.append(output.hidden_states.flatten().long())
        else:
            logits.append(output.logits[:, -1].float())
            choice = logits[-1].clone()
            choice[:, job.get("barred", [])] = -torch.inf
            tokens.append(choice.argmax(-1))
        fed = torch.tensor([row[step] for row in forced]) if forced else tokens[-1]
        input_ids, positions = fed[:, None], lengths + step
        mask = (torch.arange(width + step) < positions).long()  # what came before, without the token itself
    return torch.stack(tokens, 1).tolist(), torch.stack(logits, 1).numpy() if logits else []


def generate(model_cls, job, rank, out, make_ready):
    model = build(model_cls, job)
    make_ready(model)
    batch = job["neuron"]["batch_size"]
    forced = job.get("forced")
    tokens, logits = [], []
    with torch.inference_mode():
        for start in range(0, len(job["prompts"]), batch):
            rows = slice(start, start + batch)
            new_tokens, new_logits = generate_batch(model, job, job["prompts"][rows], forced and forced[rows])
            tokens += new_tokens
            logits += list(new_logits)
    if rank == 0 and job.get("logits"):
        numpy.savez_compressed(
            Path(out) / f"{job['name']}.npz", **{str(index): of_prompt for index, of_prompt in enumerate(logits)}
        )
    return {"tokens": tokens}


def answer(model_cls, job, rank, out, make_ready):
    """This project's own `generate`, which chooses on the host."""
    from smollm3_neuron.generate.generation import generate

    model = build(model_cls, job)
    make_ready(model)
    if "drafts" not in job:
        rows = generate(model, job["prompts"], job["new_tokens"])
        accepted = {"accepted": [[row.accepted, row.offered] for row in rows]} if "draft" in job else {}
        return {"tokens": [row.tokens for row in rows], **accepted}
    with drafted(job["prompts"], job["drafts"]):
        count = job["neuron"]["speculation_length"] - 1
        rows = generate(model, job["prompts"], job["new_tokens"], prompt_lookup=count)
    return {"tokens": [row.tokens for row in rows], "accepted": [[row.accepted, row.offered] for row in rows]}


@contextmanager
def drafted(prompts, drafts):
    """In the place of what `generate` looks up, candidates are what `drafts` goes on with behind each prompt."""
    from smollm3_neuron.generate import generation

    class Drafts(generation.PromptLookup):
        def __call__(self, row, tokens):
            behind = [draft[len(tokens) - len(p) :] for p, draft in zip(prompts, drafts) if list(tokens[: len(p)]) == p]
            return behind[0][: self.count]

    looked_up, generation.PromptLookup = generation.PromptLookup, Drafts
    try:
        yield
    finally:
        generation.PromptLookup = looked_up


def serve(model_cls, job, rank, out, make_ready):
    """Greedy tokens of requests that come and go.

    A step feeds all running requests that do not rest, in an order that turns with the steps, and encodes those that
    arrive.
    """
    model = build(model_cls, job)
    make_ready(model)
    tokens = [[] for _ in job["prompts"]]
    rests = job.get("rests", [()] * len(tokens))
    model.reset()
    with torch.inference_mode():
        for step in range(max(map(sum, zip(job["comes"], job["stays"], map(len, rests))))):
            arriving = [request for request, comes in enumerate(job["comes"]) if comes == step]
            running = [request for request, row in enumerate(tokens) if row and len(row) < job["stays"][request]]
            running = [request for request in running if step not in rests[request]]
            if running:
                running = running[step % len(running) :] + running[: step % len(running)]
            for requests, is_prompt in ((running, False), (arriving, True)):
                if not requests:
                    continue
                fed = [job["prompts"][r] if is_prompt else tokens[r][-1:] for r in requests]
                lengths = torch.tensor([len(row) for row in fed])[:, None]
                width = int(lengths.max())
                positions = torch.arange(width).expand(len(requests), width)
                positions = positions.masked_fill(torch.arange(width) >= lengths, 1)
                if not is_prompt:
                    positions = torch.tensor([[len(job["prompts"][r]) + len(tokens[r]) - 1] for r in requests])
                output = model(
                    torch.tensor([row + [0] * (width - len(row)) for row in fed]),
                    position_ids=positions,
                    attention_mask=(torch.arange(width) < lengths).long() if is_prompt else None,
                    seq_ids=torch.tensor([job["lines"][r] for r in requests]),
                )
                for request, token in zip(requests, output.logits[:, -1].argmax(-1).tolist()):
                    tokens[request].append(token)
    return {"tokens": tokens}


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


class OperatorCount(TorchDispatchMode):
    """Counts the operators called while it is entered: all, those that compute (no views), and matrix products.

    `by_origin` counts those that compute by whose line calls them.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.computing, self.products, self.by_origin = 0, 0, 0, Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        is_view = name == "_unsafe_view" or any(
            value.alias_info and not value.alias_info.is_write for value in function._schema.returns
        )
        self.calls += 1
        self.computing += not is_view
        self.products += name in PRODUCTS
        if not is_view:
            self.by_origin[_origin(sys._getframe(1))] += 1
        return function(*args, **(kwargs or {}))


def _origin(frame):
    """The package of the nearest caller that is not torch: "model" (this project's), the library's or transformers."""
    while frame:
        parts = Path(frame.f_code.co_filename).parts
        for name in ("torch", "neuronx_distributed_inference", "neuronx_distributed", "transformers"):
            if name in parts:
                break
        else:
            return "model"
        if name != "torch":
            return name
        frame = frame.f_back
    return "torch"


@torch.no_grad()
def cost(model_cls, job, rank, out, make_ready):
    """What one step of token generation calls, after a prompt of three tokens."""
    model = build(model_cls, job)
    make_ready(model)
    model.reset()
    model(
        torch.tensor([[5, 6, 7]]),
        attention_mask=torch.ones(1, 3, dtype=torch.long),
        position_ids=torch.tensor([[0, 1, 2]]),
        seq_ids=torch.tensor([0]),
    )
    mask = torch.ones(1, job["neuron"]["seq_len"], dtype=torch.long)
    step = torch.tensor([[8]]), mask, torch.tensor([[3]]), torch.tensor([0]), torch.ones(1, 3)
    with OperatorCount() as count:
        model.token_generation_model.model(*step)
    return {
        "calls": count.calls,
        "computing": count.computing,
        "products": count.products,
        "by_origin": dict(count.by_origin),
    }


class Blocks:
    """The blocks of the cache as vLLM hands them out: a full block is found again by all the tokens up to its end."""

    def __init__(self, neuron):
        self.size, self.per_request = neuron["pa_block_size"], neuron["seq_len"] // neuron["pa_block_size"]
        self.free, self.by_tokens = iter(range(1, neuron["pa_num_blocks"])), {}  # block 0 is vLLM's padding

    def table_of(self, prompt):
        """The request's blocks, and how many of its tokens are in the cache; the last token never counts."""
        table, cached = [], 0
        for end in range(self.size, self.size * self.per_request + 1, self.size):
            key = tuple(prompt[:end]) if end <= len(prompt) else None
            if key in self.by_tokens and end < len(prompt):
                cached = end
                table.append(self.by_tokens[key])
            else:
                table.append(next(self.free))
                self.by_tokens[key] = table[-1]
        return table, cached

    def slots(self, table, first, last):
        return [table[p // self.size] * self.size + p % self.size for p in range(first, last)]


def share(model_cls, job, rank, out, make_ready):
    """Greedy tokens of requests that share their beginnings: the model is called as vllm-neuron calls it.

    The prompts are encoded one by one, and decoded together on slots in falling order; "cached" says for each how many
    of its tokens were in the cache already.
    """
    model = build(model_cls, job)
    make_ready(model)
    blocks, tokens, tables, cached_tokens = Blocks(job["neuron"]), [], [], []
    with torch.inference_mode():
        for prompt in job["prompts"]:
            table, cached = blocks.table_of(prompt)
            logits = model(
                torch.tensor([prompt]),
                position_ids=torch.arange(len(prompt))[None],
                seq_ids=torch.tensor([0]),
                block_table=torch.tensor([table]),
                slot_mapping=torch.tensor([blocks.slots(table, cached, len(prompt))]),
                full_context_lens=torch.tensor([[len(prompt)]]),
                computed_context_lens=torch.tensor([[cached]]),
            ).logits
            tokens.append([int(logits[0, -1].argmax())])
            tables.append(table)
            cached_tokens.append(cached)
        for step in range(job["new_tokens"] - 1):
            lengths = [len(prompt) + step for prompt in job["prompts"]]
            positions = torch.tensor(lengths)[:, None]
            logits = model(
                torch.tensor([row[-1:] for row in tokens]),
                position_ids=positions,
                seq_ids=torch.arange(len(tokens)).flip(0),
                block_table=torch.tensor(tables),
                slot_mapping=torch.tensor([blocks.slots(t, p, p + 1) for t, p in zip(tables, lengths)]),
                full_context_lens=positions + 1,
                computed_context_lens=positions,
            ).logits
            for row, token in zip(tokens, logits[:, -1].argmax(-1).tolist()):
                row.append(token)
    return {"tokens": tokens, "cached": cached_tokens}


def load_logits(out, name):
    with numpy.load(Path(out) / f"{name}.npz") as arrays:
        return [arrays[str(i)] for i in range(len(arrays))]


def digest(tensor):
    """Of dtype, shape and bytes."""
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + content).hexdigest()


def library_sharder(model, folder):
    model.get_builder(False).shard_checkpoint(serialize_path=folder)


def shard(model_cls, job, rank, out, sharder=library_sharder):
    """One dict of digests per rank. The library shards a quantized model from a checkpoint that it quantized itself."""
    with tempfile.TemporaryDirectory(dir=out) as scratch, tempfile.TemporaryDirectory(dir=out) as quantized:
        folder = Path(out) / job["name"] if job.get("keep") else Path(scratch)
        if job["neuron"].get("quantized"):
            job = {**job, "neuron": {**job["neuron"], "quantized_checkpoints_path": quantized}}
        model = build(model_cls, job)
        if job["neuron"].get("quantized") and sharder is library_sharder:
            model_cls.save_quantized_state_dict(job["checkpoint"], model.config)
        sharder(model, str(folder))
        files = [folder / f"tp{r}_sharded_checkpoint.safetensors" for r in range(job["neuron"]["tp_degree"])]
        return {"digests": [{name: digest(t) for name, t in sorted(load_file(file).items())} for file in files]}
