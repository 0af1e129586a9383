"""Imported before a process forks: the libraries with all that they import when they first export and load a graph."""

import io
import os
import warnings

os.environ["OMP_NUM_THREADS"] = "1"  # a fork has none of the threads that its parent had
warnings.simplefilter("ignore")

import safetensors.torch  # noqa: F401
import torch
import transformers

for name in ("SmolLM3ForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "GenerationConfig"):
    getattr(transformers, name)  # each fork would import it again

_program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
_program._example_inputs = None  # torch's loader would unpickle them, with a warning
_file = io.BytesIO()
torch.export.save(_program, _file)
_file.seek(0)
torch.export.load(_file)
