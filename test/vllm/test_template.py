"""The plugin and the chat template in real vLLM, 0.11 and 0.13: no engine, no NxD Inference."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import MODEL, ROOT, TINY
from serving import vllm_version
from transformers import AutoTokenizer

from smollm3_neuron.generate import chat

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(vllm_version() is None, reason="needs vLLM: make vllm-venv")]
OF_3B = MODEL / "test/data/smollm3_chat_template.jinja"
USER = {"role": "user", "content": "What is 3+4?"}
TOOL = {"name": "get_weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}
LOADS = """
import sys
from vllm.plugins import load_general_plugins
load_general_plugins(); load_general_plugins()
assert "neuronx_distributed_inference" not in sys.modules
sys.path.append(sys.argv[1])
from neuronx_distributed_inference.utils.constants import MODEL_TYPES
from smollm3_neuron.modeling_smollm3_3b import NeuronSmolLM3ForCausalLM
assert MODEL_TYPES["smollm3"]["causal-lm"] is NeuronSmolLM3ForCausalLM
"""


def test_vllm_loads_the_plugin():
    command = [sys.executable, "-c", LOADS, str(ROOT / "contrib/nxd_cpu")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(params=["tiny", "SmolLM3-3B"])
def tokenizer(request):
    path = TINY / "chat_template.jinja" if request.param == "tiny" else OF_3B
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = Path(path).read_text()
    return tokenizer


@pytest.mark.parametrize(
    "variables",
    [
        {}, {"enable_thinking": False}, {"custom_instructions": "Be brief."}, {"xml_tools": [TOOL]},
        {"python_tools": ["def f(): ..."], "enable_thinking": False}, {"today": "17 March 2026"},
        {"tools": [{"type": "function", "function": TOOL}]},
    ],
)  # fmt: skip
def test_the_template_file_gets_every_variable(tokenizer, variables):
    """vLLM passes on only what it finds read in the template."""
    from vllm.entrypoints.chat_utils import apply_hf_chat_template

    variables = dict(variables)
    expected = chat.render(tokenizer, [USER], **variables)
    tools, template = variables.pop("tools", None), chat.guarded_template(tokenizer.chat_template)
    prompt = apply_hf_chat_template(
        tokenizer,
        [USER],
        template,
        tools,
        model_config=SimpleNamespace(trust_remote_code=False),
        add_generation_prompt=True,
        **variables,
    )
    assert prompt == expected


def test_vllm_hands_the_template_texts(tokenizer):
    """And not lists of parts, for every string."""
    from vllm.entrypoints.chat_utils import _detect_content_format

    template = chat.guarded_template(tokenizer.chat_template)
    assert _detect_content_format(template, default="none") == "string"
