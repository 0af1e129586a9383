"""Jobs of emulated.py beside those of model_jobs.py: what only a device path has, and the project's own `generate`."""

import torch

from nxd_sources import model_jobs


def requests(model_cls, job, rank, out, make_ready):
    """Greedy tokens of requests that come and go, as `model_jobs.serve`, but with rows that rise by their line of the
    cache: an engine's order, which async_mode wants."""
    model = model_jobs.build(model_cls, job)
    make_ready(model)
    tokens = [[] for _ in job["prompts"]]
    for step in range(max(map(sum, zip(job["comes"], job["stays"])))):
        live = [r for r, row in enumerate(tokens) if row and len(row) < job["stays"][r]]
        for request in [r for r, comes in enumerate(job["comes"]) if comes == step]:
            prompt = job["prompts"][request]
            tokens[request] += choices(_prefill(model, prompt, job["lines"][request]))
        if live:
            live.sort(key=lambda request: job["lines"][request])
            positions = torch.tensor([[len(job["prompts"][r]) + len(tokens[r]) - 1] for r in live])
            output = model(
                torch.tensor([tokens[r][-1:] for r in live]),
                attention_mask=(torch.arange(int(positions.max())) < positions).long(),
                position_ids=positions,
                seq_ids=torch.tensor([job["lines"][r] for r in live]),
            )
            for request, token in zip(live, choices(output)):
                tokens[request].append(token)
    return {"tokens": tokens}


def _prefill(model, prompt, line):
    return model(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        position_ids=torch.arange(len(prompt))[None],
        seq_ids=torch.tensor([line]),
    )


def choices(output) -> list[int]:
    """A token per row, of the device's own choice or the best of its logits."""
    if output.tokens.is_floating_point():
        return output.logits[:, -1].argmax(-1).tolist()
    return output.tokens.flatten().tolist()


def project_generate(model_cls, job, rank, out, make_ready):
    """The project's `generate` for the first prompt, the first two, ... : "groups" of so many."""
    from smollm3_neuron.generate.generation import Sampling, generate

    model = model_jobs.build(model_cls, job)
    make_ready(model)
    sampling = Sampling(**job.get("sampling", {}))
    groups = [generate(model, job["prompts"][:n], job["new_tokens"], sampling=sampling) for n in job["groups"]]
    return {"tokens": [[result.tokens for result in results] for results in groups]}


def shards(model_cls, job, rank, out, make_ready):
    """Writes the shards of model and draft with the project's own writer, to OUT/ours."""
    from smollm3_neuron.weights.shard_writer import Model, write_shards

    make_ready(model_jobs.build(model_cls, job))
    config = model_jobs.build_config(model_cls, job)
    of_draft = config.fused_spec_config.draft_config
    draft = Model(job["draft"], of_draft.checkpoint_config, of_draft.neuron_config)
    write_shards(job["checkpoint"], config.checkpoint_config, config.neuron_config, out / "ours", draft=draft)
    return {}


def left_out(model_cls, job, rank, out, make_ready):
    """A token step for line 0 alone, while the other lines hold requests: which (line, position) of the first cache
    change, per NeuronCore, and the position that line 0 wrote."""
    model = model_jobs.build(model_cls, job)
    make_ready(model)
    for line, prompt in enumerate(job["prompts"]):
        _prefill(model, prompt, line)
    caches = [states["kv_mgr.past_key_values.0"] for states in model.traced_model.nxd_model.state]
    before = [cache.cpu().clone() for cache in caches]
    position = len(job["prompts"][0])
    model(torch.tensor([[7]]), position_ids=torch.tensor([[position]]), seq_ids=torch.tensor([0]))
    changed = [(cache.cpu() != old).any(-1).any(1).nonzero().tolist() for cache, old in zip(caches, before)]
    return {"changed": changed, "position": position}


def memory(model_cls, job, rank, out, make_ready):
    """Bytes in use on each NeuronCore after loading."""
    model = model_jobs.build(model_cls, job)
    make_ready(model)
    from neuron_emulator.device import extension

    return {"bytes": [extension.memory_in_use(core) for core in range(job["neuron"]["tp_degree"])]}
