# SPDX-License-Identifier: Apache-2.0
"""What shapes an artifact's graphs: its settings, their defaults and the check that they can run. Imports no torch."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import SmolLM3Error
from ..model.config import CheckpointConfig
from ..model.dtypes import MODEL_DTYPES
from ..model.switches import check_encoding
from ..weights.quantization import check_quantization

# of OnDeviceSamplingConfig; with do_sample or dynamic each request brings its own top_k, top_p and temperature
SAMPLING = {
    "do_sample": bool, "dynamic": bool, "deterministic": bool, "top_k": int, "top_p": float, "temperature": float,
    "global_topk": int,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What shapes the graphs, named as in NeuronConfig. The defaults fit a trn1.2xlarge."""

    tp_degree: int = 2
    batch_size: int = 1
    seq_len: int = 2048
    max_context_length: int | None = None  # None: seq_len
    torch_dtype: str = "bfloat16"
    fused_qkv: bool = False
    is_continuous_batching: bool = False
    ctx_batch_size: int | None = None  # None: 1 with continuous batching, else batch_size
    enable_bucketing: bool = False
    context_encoding_buckets: list[int] | None = None  # None: powers of two from 128 on
    token_generation_buckets: list[int] | None = None
    on_device_sampling_config: dict[str, Any] | None = None  # None: logits come back, and the host samples
    vocab_parallel: bool = False
    sequence_parallel_enabled: bool = False
    async_mode: bool = False
    attn_kernel_enabled: bool = False  # trn1 and inf2 have none that compiles, see model/switches.py
    windowed_context_encoding_size: int | None = None
    rope_precision: str = "float32"  # of cos and sin; "float64": a table, see model/rope.py
    padded_intermediate_size: int | None = None  # MLPs padded with zeros up to it; None: as the checkpoint has them
    apply_seq_ids_mask: bool = False  # a token step keeps the lines that it leaves out
    is_prefix_caching: bool = False  # with the block KV layout
    speculation_length: int = 0  # tokens that one graph verifies at once, see generate/speculation.py; 0: none
    enable_fused_speculation: bool = False  # a draft guesses them, in one graph with the model
    pa_block_size: int | None = None  # None: 32 with prefix caching
    pa_num_blocks: int | None = None  # None: enough for batch_size requests of seq_len
    lora_config: dict[str, Any] | None = None  # LoRA adapters served unmerged, see serving_config of weights/adapter.py
    quantized: bool = False
    quantization_type: str = "per_tensor_symmetric"
    quantization_dtype: str = "int8"
    modules_to_not_convert: list[str] | None = None

    def checked(self, config: CheckpointConfig) -> "Settings":
        """Returns these settings, complete, for a checkpoint with this config.

        Raises SmolLM3Error where they cannot run.
        """
        config.plan(self.tp_degree)  # raises SmolLM3Error for a degree that is not possible
        config.padded(self)  # and for a size
        if self.torch_dtype not in MODEL_DTYPES:
            raise SmolLM3Error(f"dtype is {self.torch_dtype!r}, allowed is one of {', '.join(MODEL_DTYPES)}")
        max_context_length = self.seq_len if self.max_context_length is None else self.max_context_length
        for name, value, largest in (
            ("batch_size", self.batch_size, 1024),
            ("seq_len", self.seq_len, config.longest_sequence),
            ("max_context_length", max_context_length, self.seq_len),
        ):
            least = 1 if name == "batch_size" else 2
            if not least <= value <= largest:
                hint = ""
                if name == "seq_len" and value > largest and config.rope_scaling is None:
                    hint = f"; compile.py --context {value} stretches the model to that by YaRN"
                raise SmolLM3Error(f"{name} is {value}, allowed is a whole number from {least} to {largest}{hint}")
        ctx_batch_size = self._checked_ctx_batch_size()
        self._check_sampling()
        check_quantization(config, self)
        self._check_buckets("context_encoding_buckets", "max_context_length", max_context_length)
        self._check_buckets("token_generation_buckets", "seq_len", self.seq_len)
        pa_block_size, pa_num_blocks = self._checked_blocks()
        settings = replace(
            self,
            max_context_length=max_context_length,
            ctx_batch_size=ctx_batch_size,
            pa_block_size=pa_block_size,
            pa_num_blocks=pa_num_blocks,
        )
        check_encoding(settings)
        return settings

    def keywords(self) -> dict[str, Any]:
        """Returns NeuronConfig's keywords, with torch_dtype by its name."""
        keywords = {name: value for name, value in asdict(self).items() if value is not None}
        return {**keywords, "is_block_kv_layout": self.is_prefix_caching}

    def of_draft(self) -> "Settings":
        """Returns the settings of the draft's part of the graphs, of settings with `enable_fused_speculation`."""
        return replace(self, enable_fused_speculation=False, speculation_length=0, padded_intermediate_size=None)

    def _checked_ctx_batch_size(self) -> int:
        ctx_batch_size = self.ctx_batch_size
        if ctx_batch_size is None:
            ctx_batch_size = 1 if self.is_continuous_batching else self.batch_size
        if not self.is_continuous_batching and ctx_batch_size != self.batch_size:
            raise SmolLM3Error(
                f"ctx_batch_size is {ctx_batch_size} and batch_size {self.batch_size}: is_continuous_batching lets "
                "them differ"
            )
        if not 1 <= ctx_batch_size <= self.batch_size:
            raise SmolLM3Error(
                f"ctx_batch_size is {ctx_batch_size}, allowed is a whole number from 1 to {self.batch_size}"
            )
        return ctx_batch_size

    def _check_sampling(self) -> None:
        if self.on_device_sampling_config == {}:
            raise SmolLM3Error(f"on_device_sampling_config is empty, name at least one of {', '.join(SAMPLING)}")
        for name, value in (self.on_device_sampling_config or {}).items():
            types = (float, int) if SAMPLING.get(name) is float else (SAMPLING.get(name),)
            if type(value) not in types or not 0 <= value < math.inf or (name == "top_p" and value > 1):
                raise SmolLM3Error(
                    f"on_device_sampling_config has {name} {value!r}, allowed are {', '.join(SAMPLING)}: the first "
                    "three true or false, the rest numbers, top_p up to 1"
                )

    def context_lengths(self) -> list[int]:
        """Returns the lengths of the context encoding graphs, rising; of checked settings."""
        longest = self.max_context_length
        if not self.enable_bucketing:
            return [longest]
        powers = [2**power for power in range(7, round(math.log2(longest)))]  # as the library rounds
        return self.context_encoding_buckets or [*powers, longest]

    def _checked_blocks(self) -> tuple[int | None, int | None]:
        """Returns pa_block_size and pa_num_blocks, complete; None for both without prefix caching."""
        if not self.is_prefix_caching:
            for name in ("pa_block_size", "pa_num_blocks"):
                if getattr(self, name) is not None:
                    raise SmolLM3Error(
                        f"{name} is {getattr(self, name)}, but is_prefix_caching is off: turn it on or leave the "
                        "other out"
                    )
            return None, None
        pa_block_size = 32 if self.pa_block_size is None else self.pa_block_size
        enough = self.batch_size * self.seq_len // max(pa_block_size, 1)
        return pa_block_size, enough if self.pa_num_blocks is None else self.pa_num_blocks

    def _check_buckets(self, name: str, limit_name: str, limit: int) -> None:
        buckets = getattr(self, name)
        if buckets is None:
            return
        if not self.enable_bucketing:
            raise SmolLM3Error(f"{name} is {buckets}, but enable_bucketing is off: turn it on or leave the buckets out")
        if not buckets or buckets != sorted(set(buckets)) or buckets[0] < 2 or buckets[-1] != limit:
            raise SmolLM3Error(
                f"{name} is {buckets}, allowed are rising whole numbers of at least 2 that end with {limit_name}, "
                f"which is {limit}"
            )
