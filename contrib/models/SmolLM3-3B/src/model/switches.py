# SPDX-License-Identifier: Apache-2.0
"""The switches of NeuronConfig that are refused, each with its reason: they treat a NoPE layer wrongly, cannot run on
NeuronCore v2 (trn1, inf2), or were never checked with this model.

A switch that is not in the table was read or run and is right, or the library itself refuses it. No Neuron import.
"""

import contextlib
import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import SmolLM3Error
from .releases import BY_INTERFACES, CHECKED, minor

logger = logging.getLogger("Neuron")
NEEDS_V3 = "its kernel needs NeuronCore v3, trn1 and inf2 have v2"
NO_SPECULATION = "speculative decoding with a draft or with heads was never checked with this model"
WITHOUT_SPECULATION = (
    ("is_prefix_caching", "the library verifies no tokens with the block KV layout"),
    ("async_mode", "a step is given to the device before the last one's tokens are accepted or not"),
    ("windowed_context_encoding_size", "the two were never checked together"),
    ("lora_config", "the two were never checked together"),
)
ROPE_PRECISIONS = ("float32", "float64")
SILU_KERNELS = ("mlp_kernel_enabled", "mlp_tkg_nki_kernel_enabled", "quantized_mlp_kernel_enabled")
# docs/device_facts.md has the sources
KERNEL_REPORTS = (
    "attn_kernel_enabled is on, but on trn1 and inf2 its kernel ended neuronx-cc in public reports of 2026 "
    "(NCC_INLA001, contexts of 4096 tokens and more; neuronx-cc 2.24 and 2.26), and it compiled without"
)
RESIDUAL = "the decoder layer adds its residuals itself, so they would be missing or added twice"


@dataclass(frozen=True)
class Refusal:
    """A switch that must be off, in the releases of NxD Inference that it names."""

    name: str
    reason: str
    releases: tuple[str, ...] = CHECKED
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
    Refusal("flash_decoding_enabled", "it needs cores in groups that share a KV head, which are not laid out here"),
    Refusal("layer_boundary_markers", "the model was never checked with markers between its layers"),
    Refusal("chunked_prefill_config", "this release has no chunked prefill", ("0.8", "0.9")),
    Refusal("chunked_prefill_config", "chunked prefill was never checked with this model", ("0.7",)),
    *(
        Refusal(name, NO_SPECULATION)
        for name in (
            "enable_fused_speculation", "enable_eagle_speculation", "is_eagle_draft", "token_tree_config", "is_medusa",
            "medusa_speculation_length", "num_medusa_heads",
        )
    ),
)  # fmt: skip


@contextlib.contextmanager
def quiet_about_keywords() -> Iterator[None]:
    """Keeps the library's warning of unexpected keywords from the log: `check_keywords` refuses what is unknown."""

    def is_other(record: logging.LogRecord) -> bool:
        return "Unexpected keyword arguments" not in record.getMessage()

    root = logging.getLogger()
    root.addFilter(is_other)
    try:
        yield
    finally:
        root.removeFilter(is_other)


def check_keywords(given: Mapping[str, Any], neuron_config: Any) -> None:
    """Raises SmolLM3Error for a keyword that NeuronConfig does not know and would drop with a warning."""
    known = vars(neuron_config)
    for name in given:
        if name not in known:
            close_matches = difflib.get_close_matches(name, known, 1)
            hint = f", only {close_matches[0]!r}" if close_matches else ""
            raise SmolLM3Error(
                f"NeuronConfig has no {name!r} in the installed NxD Inference{hint}: correct it, or leave it out (with "
                "vLLM it comes from override_neuron_config)"
            )


def choose_attention_kernel(neuron_config: Any, has_windows: bool) -> None:
    """Sets `attn_kernel_enabled` where it is None, and warns where it is on and a logical core is one physical core.

    None is the library's choice: a kernel from 4,096 tokens on, which does not compile on NeuronCore v2 (trn1, inf2),
    and with a sliding window one that trn1 has not.
    """
    is_v2 = int(neuron_config.logical_nc_config) == 1
    if neuron_config.attn_kernel_enabled is None and (is_v2 or has_windows):
        neuron_config.attn_kernel_enabled = False
    elif neuron_config.attn_kernel_enabled and is_v2:
        logger.warning(KERNEL_REPORTS)


def check_switches(neuron_config: Any, no_rope_layers: Sequence[int], hidden_act: str, release: str | None) -> None:
    """Raises SmolLM3Error where a switch would run wrong.

    `release` is NxD Inference's version, e.g. "0.8.0". With one that is not supported, or None where it is unknown, the
    refusals of all releases hold.
    """
    if neuron_config.padding_side != "right":
        raise SmolLM3Error(
            f"padding_side is {neuron_config.padding_side!r}, allowed is 'right': leave it out and pad prompts on the "
            "right"
        )
    for name in SILU_KERNELS:
        if getattr(neuron_config, name, None) and hidden_act != "silu":
            raise SmolLM3Error(
                f"{name} is on, but its kernel computes silu and hidden_act is {hidden_act!r}; leave it out"
            )
    sources = minor(release or "")
    sources = BY_INTERFACES.get(sources, sources)
    for refusal in REFUSED:
        value = getattr(neuron_config, refusal.name, None)
        applies = sources not in CHECKED or sources in refusal.releases
        if value and applies and not (refusal.only_with_nope and all(no_rope_layers)):
            raise SmolLM3Error(f"{refusal.name} is {value!r}, but {refusal.reason}; leave it out")


def check_sampling(neuron_config: Any, vocab_size: int) -> None:
    """Raises SmolLM3Error where the device would look for the best of more tokens than there are."""
    sampling = neuron_config.on_device_sampling_config
    if not sampling or not (sampling.do_sample or sampling.dynamic):
        return
    if not 1 <= sampling.global_topk <= vocab_size:
        raise SmolLM3Error(
            f"on_device_sampling_config has a global_topk of {sampling.global_topk}, allowed is 1 to the vocabulary's "
            f"{vocab_size} tokens: set global_topk (256 where it is not given)"
        )


def check_encoding(neuron_config: Any) -> None:
    """Raises SmolLM3Error for ways to encode a context that do not go together, or not with its lengths.

    `neuron_config` is a NeuronConfig, or the settings of an artifact, which have its names.
    """
    window = neuron_config.windowed_context_encoding_size
    _check_rope_precision(neuron_config)
    if neuron_config.sequence_parallel_enabled:
        _check_divisible(neuron_config, "sequence_parallel_enabled", "tp_degree", neuron_config.tp_degree)
    if window is not None:
        if window < 2:
            raise SmolLM3Error(f"windowed_context_encoding_size is {window}, allowed is a whole number of at least 2")
        if neuron_config.sequence_parallel_enabled:
            raise SmolLM3Error(
                f"windowed_context_encoding_size is {window} with sequence_parallel_enabled: together they give wrong "
                "tokens, leave one of them out"
            )
        if neuron_config.ctx_batch_size != neuron_config.batch_size:  # the library reads the lines of all requests
            raise SmolLM3Error(
                f"windowed_context_encoding_size is {window} with a ctx_batch_size of {neuron_config.ctx_batch_size} "
                f"and a batch_size of {neuron_config.batch_size}: make them equal or leave it out"
            )
        _check_divisible(neuron_config, "windowed_context_encoding_size", "it, which is", window)
    if neuron_config.apply_seq_ids_mask and not neuron_config.is_continuous_batching:
        raise SmolLM3Error(
            "apply_seq_ids_mask is on without is_continuous_batching: it keeps the lines of requests that a token step "
            "leaves out, turn both on or leave it out"
        )
    if neuron_config.is_prefix_caching:
        _check_prefix_caching(neuron_config)
    elif getattr(neuron_config, "is_block_kv_layout", False):
        raise SmolLM3Error("is_block_kv_layout is on and is_prefix_caching off: turn both on or leave both out")
    if neuron_config.async_mode and not neuron_config.on_device_sampling_config:
        raise SmolLM3Error(
            "async_mode is on without on_device_sampling_config: a step takes the token of the one before from the "
            "device, give both or leave async_mode out"
        )
    if neuron_config.speculation_length:
        _check_speculation(neuron_config)


def _check_rope_precision(neuron_config: Any) -> None:
    precision = getattr(neuron_config, "rope_precision", ROPE_PRECISIONS[0])
    if precision not in ROPE_PRECISIONS:
        raise SmolLM3Error(f"rope_precision is {precision!r}, allowed is {' or '.join(map(repr, ROPE_PRECISIONS))}")
    if precision == "float64" and getattr(neuron_config, "attn_tkg_builtin_kernel_enabled", False):
        raise SmolLM3Error(
            "rope_precision is 'float64', but the kernel of attn_tkg_builtin_kernel_enabled computes cos and sin "
            "itself; leave one of them out"
        )


def _check_divisible(neuron_config: Any, switch: str, divisor_name: str, divisor: int) -> None:
    lengths = [neuron_config.max_context_length, *(neuron_config.context_encoding_buckets or [])]
    if neuron_config.enable_bucketing and not neuron_config.context_encoding_buckets:
        # the library's own buckets are powers of two from 128
        lengths.append(min(128, neuron_config.max_context_length))
    for length in lengths:
        if length % divisor:
            raise SmolLM3Error(
                f"{switch}: a context of {length} does not divide by {divisor_name} {divisor}; choose "
                "max_context_length (and context_encoding_buckets) that do, or leave it out"
            )


def _check_speculation(neuron_config: Any) -> None:
    length = neuron_config.speculation_length
    if not 2 <= length < neuron_config.seq_len:
        raise SmolLM3Error(
            f"speculation_length is {length}, allowed is 0 (off) or a whole number from 2 to "
            f"{neuron_config.seq_len - 1}, below seq_len"
        )
    spec_batch_size = getattr(neuron_config, "spec_batch_size", neuron_config.batch_size)
    if spec_batch_size != neuron_config.batch_size:
        raise SmolLM3Error(
            f"speculation_length is {length} with a spec_batch_size of {spec_batch_size} and a batch_size of "
            f"{neuron_config.batch_size}: a step verifies all rows, leave spec_batch_size out"
        )
    for name, reason in WITHOUT_SPECULATION:
        if getattr(neuron_config, name, None):
            raise SmolLM3Error(f"speculation_length is {length} with {name}, but {reason}: leave one of them out")
    sampling = neuron_config.on_device_sampling_config
    for name in ("do_sample", "dynamic"):
        value = sampling.get(name) if isinstance(sampling, Mapping) else getattr(sampling, name, None)
        if value:
            raise SmolLM3Error(
                f"speculation_length is {length} and on_device_sampling_config has {name}, but a device that verifies "
                "tokens is greedy: leave it out, or sample on the host"
            )


def _check_prefix_caching(neuron_config: Any) -> None:
    block_size, num_blocks = neuron_config.pa_block_size, neuron_config.pa_num_blocks
    if neuron_config.ctx_batch_size != 1:
        raise SmolLM3Error(
            f"is_prefix_caching with a ctx_batch_size of {neuron_config.ctx_batch_size}: it takes 1 prompt at a time, "
            "set ctx_batch_size to 1, with is_continuous_batching for more requests"
        )
    for name in ("windowed_context_encoding_size", "apply_seq_ids_mask"):
        if getattr(neuron_config, name):
            raise SmolLM3Error(f"{name} and is_prefix_caching are both set: leave one of them out")
    if neuron_config.context_encoding_buckets and not getattr(neuron_config, "prefix_buckets", None):
        raise SmolLM3Error(
            "context_encoding_buckets with is_prefix_caching need prefix_buckets, too: leave them out for the "
            "library's own"
        )
    if block_size < 1 or block_size & (block_size - 1):
        raise SmolLM3Error(f"pa_block_size is {block_size}, allowed is a power of two")
    for name in ("max_context_length", "seq_len", "context_encoding_buckets", "prefix_buckets"):
        lengths = getattr(neuron_config, name, None)
        for length in lengths if isinstance(lengths, list) else [lengths or 128]:
            if length < 128 or length % block_size:  # the library takes a context below 128 for a token
                raise SmolLM3Error(
                    f"{name} is {lengths}, with is_prefix_caching allowed are multiples of pa_block_size, "
                    f"{block_size}, of at least 128"
                )
    if num_blocks * block_size < neuron_config.seq_len:
        raise SmolLM3Error(
            f"pa_num_blocks is {num_blocks}: of pa_block_size {block_size} at least "
            f"{neuron_config.seq_len // block_size} are needed for a seq_len of {neuron_config.seq_len}"
        )
