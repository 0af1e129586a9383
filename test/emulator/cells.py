"""What runs on the emulated device: the feature matrix of test_features.py, and what CPU modes could not reach."""

from dataclasses import dataclass, replace

from reference import tiny_prompts
from test_features import CONTINUOUS, CPU, FEATURES, REQUESTS, Feature, prompt

GREEDY = {"on_device_sampling_config": {"do_sample": False, "top_k": 1}}
ASYNC = {**GREEDY, "async_mode": True}
CONTINUOUS_1 = {**CONTINUOUS, "ctx_batch_size": 1, "tp_degree": 2}
BUCKETS = {"enable_bucketing": True, "seq_len": 256}
TWO = [prompt(9), prompt(40, 1)]
# rows come and go, and a line is free for a while
COME_AND_GO = dict(comes=[0, 0, 2, 7, 13], stays=[12, 6, 14, 10, 5], lines=[1, 2, 0, 2, 1])
PER_CHANNEL = {"quantized": True, "quantization_type": "per_channel_symmetric"}


@dataclass(frozen=True, eq=False)
class Cell(Feature):
    """A feature whose job may be one of device_jobs.py. Without prompts: the four shortest that were published."""

    kind: str = ""

    def given(self) -> "Cell":
        return self if self.prompts else replace(self, prompts=tiny_prompts()[:4])

    def job(self, checkpoints):
        job = Feature.job(self.given(), checkpoints)
        neuron = {"on_cpu": False, "save_sharded_checkpoint": True, **job["neuron"]}
        return {**job, "neuron": neuron, "kind": self.kind or job["kind"]}

    def expected(self, checkpoints):
        return Feature.expected(self.given(), checkpoints)


def from_feature(feature: Feature) -> Cell:
    return Cell(**{name: getattr(feature, name) for name in Feature.__dataclass_fields__})


def tiny(name, neuron) -> Cell:
    return Cell(name, {"tp_degree": 2, "batch_size": 1, **neuron}, [], "tiny")


EXTRA = [
    tiny("tiny", {}),
    tiny("tiny-fused-tp4", {"tp_degree": 4, "fused_qkv": True}),
    tiny("tiny-tp8", {"tp_degree": 8, "batch_size": 2}),
    tiny("tiny-tp16", {"tp_degree": 16, "batch_size": 2}),
    tiny("tiny-tp32", {"tp_degree": 32, "batch_size": 2}),
    tiny("tiny-bfloat16", {"torch_dtype": "bfloat16", "batch_size": 2}),
    tiny("tiny-float16", {"torch_dtype": "float16"}),
    tiny("tiny-shards-on-load", {"save_sharded_checkpoint": False}),
    Cell("async", {"tp_degree": 2, "batch_size": 1, **ASYNC}, TWO),
    Cell("async-batch", {"tp_degree": 2, **ASYNC}, TWO),
    Cell("async-buckets", {"tp_degree": 2, "batch_size": 1, **ASYNC, **BUCKETS}, [prompt(120), prompt(128, 1)]),
    Cell(
        "async-continuous-batching-buckets", {**CONTINUOUS_1, **ASYNC, **BUCKETS}, REQUESTS, serve=COME_AND_GO,
        kind="requests",
    ),
    Cell(
        "on-device-greedy-continuous-batching", {**CONTINUOUS_1, **GREEDY}, REQUESTS, serve=COME_AND_GO, kind="requests"
    ),
    Cell("sequence-parallel-tp2", {"tp_degree": 2, "sequence_parallel_enabled": True}, TWO),
    Cell("sequence-parallel-fused-tp8", {"tp_degree": 8, "sequence_parallel_enabled": True, "fused_qkv": True}, TWO),
    Cell("int8", {"tp_degree": 2, "quantized": True}, TWO),
    Cell("int8-channel", {"tp_degree": 2, "fused_qkv": True, **PER_CHANNEL}, TWO),
    Cell("f8e4m3", {"tp_degree": 2, "quantized": True, "quantization_dtype": "f8e4m3"}, TWO, "untied"),
]  # fmt: skip
LONG = Cell(
    "prompts-of-4096-tokens", {"tp_degree": 2, "batch_size": 1, "seq_len": 4224, "attn_kernel_enabled": False},
    [prompt(4096)], "4096", new_tokens=6,
)  # fmt: skip

# what the releases beside 0.8.0 run: one of each kind
CORE = {
    "tiny", "tiny-fused-tp4", "tiny-bfloat16", "async", "on-device-greedy-tp2", "on-device-sampling-tp1", "buckets-tp2",
    "continuous-batching-tp2", "window-listed-tp2", "prefix-caching-one-bucket-tp2", "sequence-parallel-tp2",
    "speculation-7-tp2",
}  # fmt: skip
# the library asserts one prompt at a time
NOT_HERE = "continuous-batching-ctx2"

CELLS = [from_feature(feature) for feature in FEATURES if feature.name != NOT_HERE] + [*EXTRA, LONG]


def cells_of(version: str) -> list[Cell]:
    """Those of a release of NxD Inference."""
    if not version.startswith("0.8"):
        return [cell for cell in CELLS if cell.name in CORE]
    return [cell for cell in CELLS if not cell.only or version in cell.only or CPU in cell.only]
