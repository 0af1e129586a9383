# SPDX-License-Identifier: Apache-2.0
"""config.json of a SmolLM3 checkpoint: reads both spellings of transformers, returns one type. Imports no torch.

Reference: transformers' `SmolLM3Config` (4.57 and 5). What it would answer with a bare IndexError, or let pass and
then compute wrongly, is an error here that names the field, the value and what is allowed.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from .dtypes import MODEL_DTYPES
from .heads import ShardingPlan
from .json_files import read_json

MODEL_TYPE = "smollm3"
LLAMA = "llama"  # a SmolLM3 without NoPE layers, as a draft may be
DRAFT_TYPES = (MODEL_TYPE, LLAMA)
NO_ROPE_LAYER_INTERVAL = 4  # transformers' default
POSITIVE_INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
REQUIRED = (*POSITIVE_INTEGERS, "rms_norm_eps", "hidden_act")
HIDDEN_ACTS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")  # the ones tested
LAYER_TYPES = ("full_attention", "sliding_attention")
LARGEST_INTEGER = 2**31 - 1
LARGEST = {"num_hidden_layers": 4096}  # each is built, or listed, before anything else is checked
LARGEST_NUMBER = 1e30  # of what float32 is computed with
# what transformers' own model ends in a traceback for, and the one value that it runs with
UNDONE = {"partial_rotary_factor": 1, "pruned_heads": {}}
# keys of rope_scaling beside rope_type: those that are required, those that are optional
ROPE_SCALING_KEYS = {
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
    ),
}
ROPE_TYPES = ("default", *ROPE_SCALING_KEYS)
INSTEAD = "use the bfloat16 safetensors checkpoint that it was made from, e.g. HuggingFaceTB/SmolLM3-3B"
OTHER_FORMATS = {".gguf": "GGUF", ".msgpack": "Flax", ".h5": "TensorFlow", ".bin": "a PyTorch pickle"}
# files that older tools write beside quantized weights without a word in config.json -> the tool
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint's resolved config: what the model is built from, whichever spelling its config.json has."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None  # with its type as rope_type; None: no scaling
    no_rope_layers: list[int]  # one flag per layer; 1 APPLIES RoPE, 0 is NoPE
    use_sliding_window: bool
    sliding_window: int | None  # in tokens; None: all layers have full attention
    layer_types: list[str]

    @property
    def query_size(self) -> int:
        """Counts the features of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Counts the features of all key heads, which are those of all value heads, too."""
        return self.num_key_value_heads * self.head_dim

    @property
    def longest_sequence(self) -> int:
        """Counts the positions that the model can use: max_position_embeddings, or what its RoPE scaling reaches."""
        positions, scaling = self.max_position_embeddings, self.rope_scaling
        if scaling is None:
            return positions
        return max(positions, int(scaling["factor"] * scaling.get("original_max_position_embeddings", positions)))

    def padded(self, neuron_config: Any) -> "CheckpointConfig":
        """Returns this config with the intermediate size that the MLPs are padded to.

        `neuron_config` is a NeuronConfig or an artifact's Settings; it is the checkpoint's own size where their
        `padded_intermediate_size` is None. Raises SmolLM3Error for a size that is not possible.
        """
        size, tp_degree = neuron_config.padded_intermediate_size, neuron_config.tp_degree
        if size is None:
            return self
        if type(size) is not int or size < self.intermediate_size or size % tp_degree:
            raise SmolLM3Error(
                f"padded_intermediate_size is {size!r}, allowed is a multiple of tp_degree, {tp_degree}, of at least "
                f"intermediate_size, {self.intermediate_size}"
            )
        return replace(self, intermediate_size=size)

    def plan(self, tp_degree: int) -> ShardingPlan:
        """Lays the heads out over `tp_degree` ranks. Raises SmolLM3Error for a degree that is not possible."""
        return ShardingPlan(tp_degree, self.num_attention_heads, self.num_key_value_heads)


def read_config(folder: str | Path, model_types: tuple[str, ...] = (MODEL_TYPE,)) -> CheckpointConfig:
    """Reads `folder`/config.json, of one of `model_types`.

    Raises SmolLM3Error where it is not there, or its values would run wrong.
    """
    check_format(folder)
    return _read(Path(folder) / "config.json", model_types)[1]


def read_config_file(path: Path) -> CheckpointConfig:
    """Reads one config.json, whatever lies beside it. Raises SmolLM3Error as `read_config` does."""
    return _read(path)[1]


def fields_for_transformers(folder: str | Path, model_types: tuple[str, ...] = (MODEL_TYPE,)) -> dict[str, Any]:
    """Returns the fields of `folder`/config.json in the one spelling that every version of transformers reads right.

    They are those that the model is built from, its dtype and token ids, and no other: `SmolLM3Config` sets any field
    of the file as an attribute, whatever it then breaks, and makes as many labels as `num_labels` says. Its version
    4.57 ends in a traceback for an empty rope_scaling and for layer_types that are longer than the model, does not read
    rope_parameters, and has a default pad_token_id that a small vocabulary lacks. Raises SmolLM3Error as `read_config`
    does.
    """
    raw, config = _read(Path(folder) / "config.json", model_types)
    pad_token_id = raw.get("pad_token_id")
    return {
        **asdict(config),
        "torch_dtype": raw.get("dtype") or raw.get("torch_dtype"),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": raw.get("eos_token_id"),
        "pad_token_id": 0 if pad_token_id is None or not 0 <= pad_token_id < config.vocab_size else pad_token_id,
    }


def token_ids(name: str, value: Any) -> list[int]:
    """Returns the token ids of a field that may have none (None), one or a list of them, as `eos_token_id` may.

    Raises SmolLM3Error for anything else, with `name`.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token <= LARGEST_INTEGER for token in ids):
        raise SmolLM3Error(f"{name} is {value!r}, allowed is null, a token id, or a list of them")
    return ids


def _read(path: Path, model_types: tuple[str, ...] = (MODEL_TYPE,)) -> tuple[dict[str, Any], CheckpointConfig]:
    """Returns the fields of a config.json, and what they resolve to."""
    if not path.exists():
        raise SmolLM3Error(f"{path.parent}: no config.json there; pass the folder of a checkpoint")
    raw = read_json(path, "download the file again")
    if not isinstance(raw, dict):
        raise SmolLM3Error(f"{path}: a JSON object is expected, found {type(raw).__name__}; download the file again")
    try:
        _check_explicit(raw, model_types)
        return raw, resolve_config(raw)
    except SmolLM3Error as error:
        raise SmolLM3Error(f"{path}: {error}") from None


def check_format(folder: str | Path) -> None:
    """Raises SmolLM3Error for a folder whose weights are in a format that is not read, or quantized by another tool."""
    for name, method in QUANTIZATION_FILES.items():
        if (Path(folder) / name).is_file():
            raise SmolLM3Error(
                f"{folder}: {name} says that it is quantized with {method!r}, which is not read; {INSTEAD}"
            )
    if file := file_of_other_format(folder):
        raise SmolLM3Error(
            f"{folder}: {file.name} is {OTHER_FORMATS[file.suffix]}, only safetensors are read; {INSTEAD}"
        )


def file_of_other_format(folder: str | Path) -> Path | None:
    """Returns a file of weights in a format that is not read, where the folder has no safetensors beside it."""
    if next(Path(folder).glob("*.safetensors"), None) is not None:
        return None
    files = (file for suffix in OTHER_FORMATS for file in sorted(Path(folder).glob(f"*{suffix}")))
    return next(files, None)


def resolve_config(fields: Mapping[str, Any]) -> CheckpointConfig:
    """Resolves the raw fields of a config.json, or those of a config that was resolved before.

    Raises SmolLM3Error for a value that would run wrong.
    """
    resolved = {name: _required(fields, name) for name in REQUIRED}
    for name in POSITIVE_INTEGERS:
        if type(resolved[name]) is not int or resolved[name] < 1:
            raise SmolLM3Error(f"{name} is {resolved[name]!r}, allowed is a whole number of at least 1")
        largest = LARGEST.get(name, LARGEST_INTEGER)
        if resolved[name] > largest:
            raise SmolLM3Error(f"{name} is {resolved[name]!r:.40}, allowed is a whole number from 1 to {largest}")
    if type(resolved["rms_norm_eps"]) not in (int, float) or not 0 < resolved["rms_norm_eps"] < 1:
        raise SmolLM3Error(f"rms_norm_eps is {resolved['rms_norm_eps']!r}, allowed is a number between 0 and 1")
    if resolved["hidden_act"] not in HIDDEN_ACTS:
        raise SmolLM3Error(f"hidden_act is {resolved['hidden_act']!r}, supported is {_one_of(HIDDEN_ACTS)}")
    is_llama = fields.get("model_type") == LLAMA
    for name, default in (("attention_bias", False), ("mlp_bias", False), ("tie_word_embeddings", not is_llama)):
        resolved[name] = fields.get(name, default)
        if resolved[name] is None:  # which transformers takes for false, also where the default is true
            resolved[name] = False
        if type(resolved[name]) is not bool:
            raise SmolLM3Error(f"{name} is {resolved[name]!r}, allowed is true or false")
    for name, value in UNDONE.items():
        if fields.get(name) is not None and fields[name] != value:
            raise SmolLM3Error(f"{name} is {fields[name]!r}, which SmolLM3 cannot be run with; leave it out")
    resolved["head_dim"] = _head_dim(fields, resolved)
    resolved["rope_theta"], resolved["rope_scaling"] = _rope(fields)
    resolved["no_rope_layers"] = _no_rope_layers(fields, resolved["num_hidden_layers"])
    resolved["sliding_window"], resolved["layer_types"] = _sliding_window(fields, resolved["no_rope_layers"])
    resolved["use_sliding_window"] = resolved["sliding_window"] is not None
    return CheckpointConfig(**resolved)


def _check_explicit(raw: Mapping[str, Any], model_types: tuple[str, ...]) -> None:
    """Checks what only the file itself can show: transformers' parser fills in defaults and hides the rest."""
    if raw.get("model_type") not in model_types:
        raise SmolLM3Error(
            f"model_type is {raw.get('model_type')!r}, this package runs {_one_of(model_types)} and no other"
        )
    parameters = raw.get("rope_parameters") or {}
    if isinstance(parameters, dict):
        _agree("rope_theta", raw.get("rope_theta"), "rope_parameters.rope_theta", parameters.get("rope_theta"))
    _agree("torch_dtype", raw.get("torch_dtype"), "dtype", raw.get("dtype"))
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None and dtype not in MODEL_DTYPES:
        raise SmolLM3Error(f"dtype is {dtype!r}, allowed is {_one_of(MODEL_DTYPES)}")
    token_ids("eos_token_id", raw.get("eos_token_id"))
    for name in ("bos_token_id", "pad_token_id"):
        if raw.get(name) is not None and type(raw[name]) is not int:
            raise SmolLM3Error(f"{name} is {raw[name]!r}, allowed is null or a token id")
    for name in ("quantization_config", "compression_config"):
        if raw.get(name) is not None:
            method = raw[name]
            if not method or not isinstance(method, dict | str):
                raise SmolLM3Error(f"{name} is {method!r}, which names no method: remove it if the weights are whole")
            if isinstance(method, dict):  # old versions of bitsandbytes do not name themselves
                is_bitsandbytes = "load_in_4bit" in method or "load_in_8bit" in method
                method = method.get("quant_method") or ("bitsandbytes" if is_bitsandbytes else "unknown")
            raise SmolLM3Error(f"{name}: the checkpoint is quantized with {method!r}, which is not read; {INSTEAD}")


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise SmolLM3Error(f"{name} is missing; the checkpoint's own config.json has it")
    return fields[name]


def _agree(name: str, value: Any, other_name: str, other: Any) -> None:
    if value is not None and other is not None and value != other:
        raise SmolLM3Error(f"{name} is {value!r} and {other_name} is {other!r}: keep one of the two")


def _one_of(allowed: tuple[str, ...]) -> str:
    return " or ".join(repr(name) for name in allowed)


def _head_dim(fields: Mapping[str, Any], resolved: Mapping[str, Any]) -> int:
    hidden, heads, kv_heads = (resolved[n] for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    if heads % kv_heads:
        raise SmolLM3Error(f"num_key_value_heads is {kv_heads}, it must divide num_attention_heads, which is {heads}")
    head_dim = fields.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise SmolLM3Error(
                f"num_attention_heads is {heads}, it must divide hidden_size, which is {hidden}, or head_dim must be "
                "given"
            )
        head_dim = hidden // heads
    if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
        raise SmolLM3Error(f"head_dim is {head_dim!r}, allowed is an even whole number of at least 2")
    return head_dim


def _rope(fields: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Returns rope_theta and rope_scaling.

    `rope_parameters`, transformers 5's spelling, wins over the default rope_theta that 4.57 puts beside it.
    """
    parameters, scaling = fields.get("rope_parameters"), fields.get("rope_scaling")
    for name, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise SmolLM3Error(f"{name} is {value!r}, allowed is null or an object")
    parameters, scaling = dict(parameters or {}), _scaling(scaling or {}, "rope_scaling")
    theta = parameters.pop("rope_theta", None)
    theta = fields.get("rope_theta") if theta is None else theta
    if type(theta) not in (int, float) or not 1 < theta <= LARGEST_NUMBER:
        state = "is missing" if theta is None else f"is {theta!r:.40}"
        raise SmolLM3Error(f"rope_theta {state}, allowed is a number above 1, up to {LARGEST_NUMBER:g}")
    if parameters:
        new_scaling = _scaling(parameters, "rope_parameters")
        if scaling is not None:
            _agree("rope_scaling", scaling, "rope_parameters", new_scaling or {"rope_type": "default"})
        scaling = new_scaling
    return float(theta), scaling


def _scaling(scaling: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Returns the scaling with its type as `rope_type`, or None where there is none."""
    if not scaling:
        return None
    scaling = {key: value for key, value in scaling.items() if value is not None}
    if not scaling:
        return None
    if "type" in scaling:  # the old spelling, which wins over rope_type in SmolLM3Config
        scaling["rope_type"] = scaling.pop("type")
    if "rope_type" not in scaling:
        raise SmolLM3Error(
            f"{name}.rope_type is missing beside {_one_of(tuple(scaling))}, allowed is {_one_of(ROPE_TYPES)}"
        )
    rope_type = scaling["rope_type"]
    if rope_type not in ROPE_TYPES:
        raise SmolLM3Error(f"{name}.rope_type is {rope_type!r}, supported is {_one_of(ROPE_TYPES)}")
    if rope_type == "default":
        if scaling.get("partial_rotary_factor", 1) != 1:
            raise SmolLM3Error(f"{name}.partial_rotary_factor is {scaling['partial_rotary_factor']!r}, allowed is 1")
        return None
    required, optional = ROPE_SCALING_KEYS[rope_type]
    for key in required:
        if key not in scaling:
            raise SmolLM3Error(f"{name}.{key} is missing, {rope_type!r} needs it")
    for key, value in scaling.items():
        if key == "rope_type" or (key == "truncate" and key in optional and type(value) is bool):
            continue
        if key not in required + optional:
            raise SmolLM3Error(f"{name}.{key} is unknown for {rope_type!r}, allowed is {_one_of(required + optional)}")
        least = 1 if key in ("factor", "original_max_position_embeddings") else 0
        if type(value) not in (int, float) or not least <= value <= LARGEST_NUMBER or not value:
            raise SmolLM3Error(
                f"{name}.{key} is {value!r:.40}, allowed is a number {'of at least 1' if least else 'above 0'}, up to "
                f"{LARGEST_NUMBER:g}"
            )
    return scaling


def _sliding_window(fields: Mapping[str, Any], no_rope_layers: list[int]) -> tuple[int | None, list[str]]:
    """Returns the window and each layer's type; without `layer_types` the NoPE layers slide, as in transformers."""
    full, sliding = LAYER_TYPES
    window, layer_types = fields.get("sliding_window"), fields.get("layer_types")
    if layer_types is not None and not isinstance(layer_types, (list, tuple)):
        raise SmolLM3Error(f"layer_types is {layer_types!r}, allowed is a list with a type for each layer")
    for layer_idx, layer_type in enumerate(layer_types or ()):
        if layer_type not in LAYER_TYPES:
            raise SmolLM3Error(f"layer_types[{layer_idx}] is {layer_type!r}, allowed is {_one_of(LAYER_TYPES)}")
    if not fields.get("use_sliding_window") or window is None:
        if layer_types and sliding in layer_types[: len(no_rope_layers)]:
            raise SmolLM3Error(
                f"layer_types has {sliding!r}, but use_sliding_window is {fields.get('use_sliding_window')!r} and "
                f"sliding_window {window!r}: set both, or make every layer {full!r}"
            )
        return None, [full] * len(no_rope_layers)
    if type(window) is not int or window < 2:
        raise SmolLM3Error(f"sliding_window is {window!r}, allowed is a whole number of at least 2")
    if layer_types is None:
        layer_types = [full if rotary else sliding for rotary in no_rope_layers]
    if len(layer_types) < len(no_rope_layers):
        raise SmolLM3Error(
            f"layer_types is {layer_types!r}, allowed is a list with a type for each of {len(no_rope_layers)} layers"
        )
    return window, list(layer_types[: len(no_rope_layers)])


def _no_rope_layers(fields: Mapping[str, Any], num_hidden_layers: int) -> list[int]:
    """Returns a flag per layer: `no_rope_layers`, or 0 for every interval-th layer, as transformers resolves it."""
    if fields.get("model_type") == LLAMA:
        return [1] * num_hidden_layers
    interval = fields.get("no_rope_layer_interval")
    interval = NO_ROPE_LAYER_INTERVAL if interval is None else interval
    if type(interval) is not int or interval < 1:
        raise SmolLM3Error(f"no_rope_layer_interval is {interval!r}, allowed is a whole number of at least 1")
    flags = fields.get("no_rope_layers")
    if flags is None:
        return [int((layer_idx + 1) % interval != 0) for layer_idx in range(num_hidden_layers)]
    if not isinstance(flags, (list, tuple)):
        raise SmolLM3Error(f"no_rope_layers is {flags!r}, allowed is a list with one 0 or 1 per layer")
    for layer_idx, flag in enumerate(flags):
        if type(flag) not in (int, bool) or flag not in (0, 1):
            raise SmolLM3Error(f"no_rope_layers[{layer_idx}] is {flag!r}, allowed is 1 (applies RoPE) or 0 (NoPE)")
    if len(flags) < num_hidden_layers:
        raise SmolLM3Error(
            f"no_rope_layers has {len(flags)} entries, at least num_hidden_layers = {num_hidden_layers} are needed"
        )
    return [int(flag) for flag in flags[:num_hidden_layers]]
