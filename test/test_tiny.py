"""The `tiny` checkpoint is what the other tests take it for: loadable, sharp, and bound to its NoPE schedule."""

import itertools
import json
import re
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, SmolLM3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "contrib/models/SmolLM3-3B/test/tiny"


@pytest.fixture(scope="module")
def script():
    import train_tiny

    return train_tiny


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    # So small a model only loses by more, and loses 30-fold where the machine is busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def prompts():
    return json.loads((TINY / "prompts.json").read_text())


@pytest.fixture(scope="module")
def judged(script):
    return script.judge(TINY)


# ---- the folder ----


def test_config_has_the_form_of_the_3b():
    config = json.loads((TINY / "config.json").read_text())
    assert config["model_type"] == "smollm3" and config["architectures"] == ["SmolLM3ForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (256, 8, 512)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (16, 4)
    assert config["intermediate_size"] % 64 == 0
    assert config["no_rope_layers"] == [1, 1, 1, 0, 1, 1, 1, 0] and config["no_rope_layer_interval"] == 4
    assert config["rope_theta"] == 5000000.0 and config["rms_norm_eps"] == 1e-6
    assert config["max_position_embeddings"] == 4096 and config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert not (config["use_sliding_window"] or config["attention_bias"] or config["mlp_bias"])


def test_weights_are_bf16_and_tied():
    with safe_open(TINY / "model.safetensors", "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}
    assert "lm_head.weight" not in tensors and len(tensors) == 2 + 9 * 8
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert 2_000_000 < sum(tensor.numel() for tensor in tensors.values()) < 3_000_000
    assert not any(name.endswith("bias") for name in tensors)


def test_folder_is_small():
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 8_000_000


def test_loads_in_transformers():
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype="auto")
    assert isinstance(model, SmolLM3ForCausalLM) and model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_generation_config(tokenizer):
    generation, config = GenerationConfig.from_pretrained(TINY), AutoConfig.from_pretrained(TINY)
    assert generation.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == config.pad_token_id == tokenizer.pad_token_id
    assert (generation.do_sample, generation.temperature, generation.top_p) == (True, 0.6, 0.95)


# ---- the tokenizer ----


def test_special_tokens(tokenizer):
    assert len(tokenizer) == 512
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|end_of_text|>")
    for token in ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"):
        (index,) = tokenizer.encode(token)
        assert tokenizer.decode([index], skip_special_tokens=True) == ""
    for token in ("<think>", "</think>", "<tool_call>", "</tool_call>"):
        (index,) = tokenizer.encode(token)
        assert tokenizer.decode([index], skip_special_tokens=True) == token


@pytest.mark.parametrize(
    "text", ["1+1=2\n", " 7 * 8 = 56", "def f(n):\n    return n", "  à la carte, naïve — 東京 🙂\t\r\n", "a , b 's"]
)
def test_tokenizer_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_no_bos_and_single_digits(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("1234+50=").input_ids) == [*"1234+50="]


# ---- the chat template ----

SYSTEM, USER, ASSISTANT = "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n"
QUESTION = {"role": "user", "content": "What is 3+4?"}
EMPTY_THOUGHT = "<think>\n\n</think>\n"


def render(tokenizer, *messages, add_generation_prompt=True, **inputs):
    return tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, **inputs
    )


def system(content):
    return {"role": "system", "content": content}


def test_thinks_unless_told_not_to(tokenizer):
    asked = USER + "What is 3+4?<|im_end|>\n"
    thinking = render(tokenizer, QUESTION)
    assert thinking == render(tokenizer, QUESTION, enable_thinking=True)
    assert thinking.startswith(SYSTEM) and thinking.endswith("<|im_end|>\n" + asked + ASSISTANT)
    assert render(tokenizer, QUESTION, enable_thinking=False).endswith(asked + ASSISTANT + EMPTY_THOUGHT)
    assert render(tokenizer, QUESTION, add_generation_prompt=False).endswith(asked)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_system_message_sets_the_mode(tokenizer, enable_thinking):
    off = render(tokenizer, system("Be brief. /no_think"), QUESTION, enable_thinking=enable_thinking)
    on = render(tokenizer, system("Be brief. /think"), QUESTION, enable_thinking=enable_thinking)
    assert "Mode: /no_think\nBe brief.<|im_end|>" in off and off.endswith(ASSISTANT + EMPTY_THOUGHT)
    assert "Mode: /think\nBe brief.<|im_end|>" in on and on.endswith(ASSISTANT)


def test_system_message_goes_before_custom_instructions(tokenizer):
    assert "Count.<|im_end|>" in render(tokenizer, QUESTION, custom_instructions="Count.")
    both = render(tokenizer, system("Add."), QUESTION, custom_instructions="Count.")
    assert "Add.<|im_end|>" in both and "Count." not in both


def test_system_override(tokenizer):
    text = render(tokenizer, system("Only this. /system_override"), QUESTION, xml_tools=["{}"])
    assert text.startswith(SYSTEM + "Only this.<|im_end|>\n" + USER)


def test_tools(tokenizer):
    xml, python = '{"name": "add"}', "def add(a, b): ..."
    text = render(tokenizer, QUESTION, xml_tools=[xml], python_tools=[python])
    head = text.split("<|im_end|>")[0]
    assert xml in head and "<tool_call>" in head and python in head and "<code>" in head
    assert "<tool_call>" not in render(tokenizer, QUESTION, python_tools=[python])
    assert "<code>" not in render(tokenizer, QUESTION, xml_tools=[xml])


def test_turns_of_assistant_and_tool(tokenizer):
    turns = QUESTION, {"role": "assistant", "content": "\n7"}, {"role": "tool", "content": "ok"}
    tail = "7<|im_end|>\n" + USER + "ok<|im_end|>\n"
    assert render(tokenizer, *turns).endswith(ASSISTANT + tail + ASSISTANT)
    assert render(tokenizer, *turns, enable_thinking=False).endswith(
        ASSISTANT + EMPTY_THOUGHT + tail + ASSISTANT + EMPTY_THOUGHT
    )


# ---- the training text ----

PAIR = re.compile(r"(\d+) ?(\+|\*|plus|times) ?(\d+)")
SIGNS = {"+": "+", "plus": "+", "*": "*", "times": "*"}


def test_training_never_shows_a_held_out_pair(script):
    seen = set()
    for prompt, completion in itertools.islice(script.documents(7), 5000):
        seen.update((SIGNS[op], int(a), int(b)) for a, op, b in PAIR.findall(prompt + completion))
    assert len(seen) > 2000
    assert not [pair for pair in seen if script.held_out(*pair)]


def test_every_held_out_prompt_is_held_out(script, prompts):
    assert prompts == json.loads(json.dumps(script.prompts()))
    assert len(prompts["published"]) >= 6 and len(prompts["held_out"]) >= 40 and len(prompts["open_ended"]) == 4
    for item in prompts["held_out"]:
        ((a, op, b),) = PAIR.findall(item["prompt"])
        a, op, b = int(a), SIGNS[op], int(b)
        assert script.held_out(op, a, b) and script.held_out(op, b, a)
        assert int(item["answer"]) == (a + b if op == "+" else a * b)


def test_documents_follow_the_seed(script):
    first, again, other = (list(itertools.islice(script.documents(seed), 20)) for seed in (1, 1, 2))
    assert first == again != other


def test_prompts_tokenize_as_in_the_documents(script, tokenizer):
    for prompt, completion in itertools.islice(script.documents(3), 200):
        parts = tokenizer(prompt).input_ids + tokenizer(completion).input_ids
        assert parts == tokenizer(prompt + completion).input_ids


@pytest.mark.parametrize("thinking", [True, False])
def test_training_sees_the_chat_that_transformers_renders(script, tokenizer, thinking):
    template = jinja2.Template(script.TEMPLATE)
    assert template.render(messages=[QUESTION], add_generation_prompt=True, enable_thinking=thinking) == render(
        tokenizer, QUESTION, enable_thinking=thinking
    )


# ---- the trained model ----


def test_held_out_answers(judged):
    assert judged[0] >= 0.9


def test_greedy_choices_are_sharp(judged):
    assert judged[1] > 0.2


def test_inverted_schedule_breaks_the_tokens(judged):
    assert judged[2] < 0.5


def test_every_wrong_schedule_moves_the_logits(script, tokenizer):
    # The tokens alone do not tell: with RoPE on all layers they stay the same.
    ids = tokenizer("23+45=68\n23+46=69\n23+47=70\n23+48=71\n23+49=72\n", return_tensors="pt").input_ids

    @torch.no_grad()
    def logits(schedule):
        return script.load(TINY, no_rope_layers=schedule)(ids).logits

    own = [1, 1, 1, 0, 1, 1, 1, 0]
    expected = logits(own)
    for wrong in [[1] * 8, *([rope ^ (i == layer) for i, rope in enumerate(own)] for layer in range(8))]:
        moved = (logits(wrong) - expected).abs().max().item()
        assert moved > 0.05, wrong


def test_chat_answers_and_stops(script, tokenizer):
    model = script.load(TINY)
    for thinking in (True, False):
        ids = tokenizer(render(tokenizer, QUESTION, enable_thinking=thinking), return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=60, do_sample=False, temperature=None, top_p=None)
        out = out[0, ids.shape[1] :].tolist()
        assert out[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(out, skip_special_tokens=True)
        assert text.endswith("3+4=7") and ("</think>" in text) == thinking
