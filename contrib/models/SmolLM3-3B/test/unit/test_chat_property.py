"""Random conversations through the guarded template: refused with a reason, or nothing that was given is lost.

Of what is rendered every piece of content stands in the prompt as often as it was given, what is left without the
pieces is what the same conversation with other pieces leaves, and where the checkpoint's template loses nothing by
itself the prompt is the template's own, byte for byte.
"""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from smollm3_neuron.errors import SmolLM3Error
from smollm3_neuron.generate import chat
from smollm3_neuron.machine.locate import tiny_folder

OF_3B = Path(__file__).resolve().parents[1] / "data/smollm3_chat_template.jinja"
TODAY = "17 March 2026"
PIECES = (
    "Ünï→{}",
    "漢字{}",
    "🙂{}",
    "<b>{}</b>",
    "a & b{}",
    "{{{{{}}}}}",
    "'q'{}\"",
    "\\n{}\\",
    "line\nbreak{}",
    "{{% if {} %}}",
)
SPOILT = ("/think", "see `/think`", "/no_think.", "a/no_think/b", "/system_override", "")


class Conversation:
    """One random conversation; `pieces` are the contents that it holds, each unlike any other."""

    def __init__(self, seed: int, sign: str = "#"):
        self.draw, self.sign, self.pieces = random.Random(seed), sign, []
        self.is_plain = True  # nothing that the template would lose, so that it is right by itself
        messages = [{"role": "system", "content": self.content(is_system=True)}] if self.chance(0.4) else []
        for _ in range(self.draw.randint(1, 4)):
            messages.append({"role": "user", "content": self.content()})
            if self.chance(0.7):
                messages.append(self.assistant())
            if self.chance(0.3):
                messages.append({"role": "tool", "content": self.content()})
        if self.chance(0.05):
            messages.insert(self.draw.randrange(len(messages) + 1), {"role": "developer", "content": self.content()})
        self.messages, self.variables = messages, self.some_variables()

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def mark(self) -> str:
        return f"{self.sign}{len(self.pieces)}{self.sign}"

    def piece(self) -> str:
        self.pieces.append(self.draw.choice(PIECES).format(self.mark()))
        return self.pieces[-1]

    def content(self, is_system=False):
        if is_system and self.chance(0.15):
            return self.draw.choice(SPOILT)
        if self.chance(0.2):
            self.is_plain = False
            return [{"type": "text", "text": self.piece()} for _ in range(self.draw.randint(1, 3))]
        if self.chance(0.03):
            self.is_plain = False
            return self.draw.choice([None, 5, {}, [{"type": "image_url"}], [{"type": "text", "text": None}], ["x"]])
        return self.piece()

    def assistant(self) -> dict:
        is_called = self.chance(0.3)
        message = {"role": "assistant", "content": None if is_called and self.chance(0.5) else self.content()}
        if self.chance(0.2):
            self.is_plain = False
            message[self.draw.choice(["reasoning_content", "reasoning"])] = self.piece()
        if is_called:
            self.is_plain = False
            message["tool_calls"] = [self.call() for _ in range(self.draw.randint(1, 2))]
        return message

    def call(self) -> dict:
        arguments = self.draw.choice([{}, "", None, {"x": self.mark()}, f'{{"x": "{self.mark()}"}}', "{"])
        if self.sign in str(arguments):
            self.pieces.append(self.mark())
        function = {"name": f"f{self.mark()}", "arguments": arguments}
        self.pieces.append(function["name"])
        return {"type": "function", "function": function} if self.chance(0.7) else function

    def tool(self):
        name = f"t{self.mark()}"
        function = {"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}}
        forms = [{"type": "function", "function": function}, {"type": "function", **function}, function]
        if self.chance(0.1):
            return self.draw.choice([{"type": "web_search"}, {"type": "function", "function": {}}, {}])
        self.pieces.append(name)
        return self.draw.choice(forms)

    def some_variables(self) -> dict:
        variables = {"today": TODAY}
        if self.chance(0.5):
            variables["enable_thinking"] = self.chance(0.5)
        if self.chance(0.3):
            self.is_plain = False
            variables["tools"] = [self.tool() for _ in range(self.draw.randint(0, 2))]
        for name in ("xml_tools", "python_tools"):
            if self.chance(0.15):
                variables[name] = [self.piece() for _ in range(self.draw.randint(1, 2))]
        if self.chance(0.2):
            variables["custom_instructions"] = self.piece()
        return variables


def without(prompt: str, pieces: list[str]) -> str:
    for piece in sorted(pieces, key=len, reverse=True):
        prompt = prompt.replace(piece, "", 1)
    return prompt


def check(tokenizer, seed: int) -> str:
    conversation = Conversation(seed)
    try:
        prompt = chat.render(tokenizer, conversation.messages, **conversation.variables)
    except SmolLM3Error as error:
        assert str(error) and "\n" not in str(error)
        return "refused"
    for piece in conversation.pieces:
        assert prompt.count(piece) == 1, (seed, piece, prompt)
    twin = Conversation(seed, "@@")
    twins_prompt = chat.render(tokenizer, twin.messages, **twin.variables)
    assert without(prompt, conversation.pieces) == without(twins_prompt, twin.pieces), seed
    if conversation.is_plain:
        own = tokenizer.apply_chat_template(
            conversation.messages,
            tokenize=False,
            add_generation_prompt=True,
            **{**conversation.variables, "strftime_now": lambda _: TODAY},
        )
        assert prompt == own, seed
        return "the template's own"
    return "repaired"


@pytest.mark.parametrize("cases", [500, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("template", ["tiny", "SmolLM3-3B"])
def test_nothing_that_was_given_is_lost(template, cases):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    if template != "tiny":
        tokenizer.chat_template = OF_3B.read_text(encoding="utf-8")
    outcomes = [check(tokenizer, seed) for seed in range(cases)]
    counted = {outcome: outcomes.count(outcome) for outcome in set(outcomes)}
    assert min(counted.values()) > cases / 20 and len(counted) == 3, counted
