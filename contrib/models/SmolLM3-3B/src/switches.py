"""NeuronConfig's switches that meet a NoPE layer wrongly, cannot run on NeuronCore v2 (trn1, inf2) or were never meant.

What is not in the table was read or run and found right, or is refused by the library itself. No Neuron import.
"""

import difflib
import importlib.metadata
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from .errors import SmolLM3Error

NEEDS_V3 = "its kernel needs NeuronCore v3, trn1 and inf2 have v2"
NO_SPECULATION = "speculative decoding was never checked with this model"
SILU_KERNELS = ("mlp_kernel_enabled", "mlp_tkg_nki_kernel_enabled", "quantized_mlp_kernel_enabled")
RESIDUAL = "the decoder layer adds its residuals itself, so they would be missing or added twice"


@dataclass(frozen=True)
class Refusal:
    name: str
    reason: str
    releases: tuple[str, ...] = ("0.7", "0.8", "0.9")
    only_with_nope: bool = False


REFUSED = (
    Refusal(
        "qkv_cte_nki_kernel_fuse_rope", "a NoPE layer would be rotated by the cos and sin of the layer before",
        only_with_nope=True,
    ),
    Refusal(
        "attn_tkg_builtin_kernel_enabled", "the kernel rotates, and a NoPE layer has nothing to rotate by",
        ("0.7", "0.8"), only_with_nope=True,
    ),
    Refusal("attn_tkg_builtin_kernel_enabled", f"it turns attn_block_tkg_nki_kernel_enabled on: {NEEDS_V3}", ("0.9",)),
    Refusal("attn_tkg_nki_kernel_enabled", f"it turns attn_block_tkg_nki_kernel_enabled on: {NEEDS_V3}", ("0.9",)),
    Refusal("attn_block_tkg_nki_kernel_enabled", NEEDS_V3),
    Refusal("attn_block_cte_nki_kernel_enabled", f"it needs attn_block_tkg_nki_kernel_enabled: {NEEDS_V3}"),
    Refusal("qkv_kernel_fuse_residual_add", RESIDUAL),
    Refusal("mlp_kernel_fuse_residual_add", RESIDUAL),
    Refusal("fused_rmsnorm_skip_gamma", "the norms' weights are not folded into the projections here"),
    Refusal("layer_boundary_markers", "the model was never checked with markers between its layers"),
    *(
        Refusal(name, NO_SPECULATION)
        for name in (
            "speculation_length", "enable_fused_speculation", "enable_eagle_speculation", "is_eagle_draft",
            "token_tree_config", "is_medusa", "medusa_speculation_length", "num_medusa_heads",
        )
    ),
)  # fmt: skip


def check_keywords(given: Mapping[str, Any], neuron_config: Any) -> None:
    """SmolLM3Error for a keyword that NeuronConfig does not know and would drop with a warning."""
    known = vars(neuron_config)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f", only {near[0]!r}" if near else ""
            raise SmolLM3Error(
                f"NeuronConfig has no {name!r} in the installed NxD Inference{hint}: correct it, or leave it out (with vLLM it "
                "comes from override_neuron_config)"
            )


def check_switches(neuron_config: Any, no_rope_layers: Sequence[int], hidden_act: str, release: str | None) -> None:
    """SmolLM3Error where a switch would run wrong. `release`: NxD Inference's, e.g. "0.8.0"; None: unknown, so any."""
    if neuron_config.padding_side != "right":
        raise SmolLM3Error(
            f"padding_side is {neuron_config.padding_side!r}, allowed is 'right': leave it out and pad prompts on the right"
        )
    for name in SILU_KERNELS:
        if getattr(neuron_config, name, None) and hidden_act != "silu":
            raise SmolLM3Error(f"{name} is on, but its kernel computes silu and hidden_act is {hidden_act!r}; leave it out")
    for refusal in REFUSED:
        value = getattr(neuron_config, refusal.name, None)
        of_release = release is None or ".".join(release.split(".")[:2]) in refusal.releases
        if value and of_release and not (refusal.only_with_nope and all(no_rope_layers)):
            raise SmolLM3Error(f"{refusal.name} is {value!r}, but {refusal.reason}; leave it out")


def check_sequence_parallel(neuron_config: Any) -> None:
    """SmolLM3Error for a context that the ranks cannot divide among them; the library asserts it while tracing."""
    if not neuron_config.sequence_parallel_enabled:
        return
    lengths = [neuron_config.max_context_length, *(neuron_config.context_encoding_buckets or [])]
    if neuron_config.enable_bucketing and not neuron_config.context_encoding_buckets:
        lengths.append(min(128, neuron_config.max_context_length))  # the library's own buckets are powers of two from 128
    for length in lengths:
        if length % neuron_config.tp_degree:
            raise SmolLM3Error(
                f"sequence_parallel_enabled: a context of {length} does not divide by tp_degree {neuron_config.tp_degree}; "
                "choose max_context_length (and context_encoding_buckets) that do, or turn it off"
            )


def installed_release() -> str | None:
    try:
        return importlib.metadata.version("neuronx-distributed-inference")
    except importlib.metadata.PackageNotFoundError:
        return None
