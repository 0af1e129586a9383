# SPDX-License-Identifier: Apache-2.0
"""What must hold of every lowered graph of SmolLM3, on the facts that hlo.py found. Imports nothing."""

from collections.abc import Iterator
from typing import Any


def faults(facts: dict[str, Any], schedule: list[int], neuron: dict[str, Any]) -> dict[str, str]:
    """Name of a check -> what is wrong.

    `schedule` is the checkpoint's no_rope_layers, `neuron` NeuronConfig's keywords.
    """
    return dict(_faults(facts, schedule, neuron))


def _faults(facts: dict[str, Any], schedule: list[int], neuron: dict[str, Any]) -> Iterator[tuple[str, str]]:
    layers = len(schedule)
    if facts["fallbacks"]:
        yield "fallback", f"operations given back to the host: {facts['fallbacks']}"
    if facts["executions"]:
        yield "execution", f"{facts['executions']} executions while tracing: a tensor's value was asked for"
    known = {str(number) for number in [*facts["buffers"], *facts["uniform"]]}
    tensors = {number: of for number, of in facts["constants"].items() if of[1] and str(number) not in known}
    if tensors:
        yield "constant", f"tensors from outside the model became parameters: {tensors}"
    if facts["dynamic"] or facts["float64"]:
        yield "shape", f"{facts['dynamic']} instructions with dynamic shapes, {facts['float64']} in float64"
    if facts["keys_rotated"] != schedule:
        yield "schedule", f"keys are rotated in {facts['keys_rotated']}, no_rope_layers is {schedule}"
    if any(facts["values_rotated"]):
        yield "values", f"values are rotated in {facts['values_rotated']}"
    for at, weights in enumerate(facts["projections"]):
        prefix = f"layers.{at // 2}.self_attn.qkv_proj"
        own = "Wqkv" if neuron.get("fused_qkv") else "v_proj" if at % 2 else "k_proj"
        if weights != [f"{prefix}.{own}.weight"]:
            yield "projection", f"{'V' if at % 2 else 'K'} of layer {at // 2} comes from {weights}"
    waves = [facts["opcodes"].get(name, 0) for name in ("cosine", "sine")]
    is_computed = any(schedule) and neuron.get("rope_precision") != "float64"  # else looked up
    if waves != ([1, 1] if is_computed else [0, 0]):
        yield "waves", f"{waves} cosines and sines: one each is enough for all layers, none beside a table of them"
    caches = {str(1 + at): f"kv_mgr.past_key_values.{at}" for at in range(2 * layers)}
    aliased = {str(output): state for output, state in facts["aliased"].items()}
    if aliased != caches or len(facts["outputs"]) != 1 + 2 * layers:
        lacking = sorted(set(caches.items()) - set(aliased.items()))
        yield "alias", f"{len(facts['outputs'])} outputs, {len(aliased)} aliased; not as they should be: {lacking}"
    counted = {}
    for name, count in facts["collectives"].items():
        opcode, _, groups = name.partition(" ")
        counted[opcode] = counted.get(opcode, 0) + count
        if groups != str([list(range(neuron["tp_degree"]))]):
            yield "collectives", f"{opcode} over {groups}"
    wanted = 0 if neuron["tp_degree"] == 1 else 2 * layers
    if neuron.get("vocab_parallel") and wanted:
        wanted += 1  # the embeddings'
    parallel = neuron.get("sequence_parallel_enabled") and facts["submodel"] == "context_encoding_model"
    if not parallel and counted.get("all-reduce", 0) != wanted:
        yield "all-reduce", f"{counted.get('all-reduce', 0)} all-reduces, {wanted} are two per layer"
    if parallel and counted.get("all-reduce", 0):
        yield "all-reduce", f"{counted['all-reduce']} all-reduces beside sequence parallelism's reduce-scatters"
