# SPDX-License-Identifier: Apache-2.0
"""A long prompt with a needle: a sentence in the middle of a text, which the question at its end asks for."""

from ..errors import SmolLM3Error
from .validation import Case

EARLIER = 32  # positions of the prompt, at which the reference is measured, too: an answer alone has few
ANSWER = "7421"
NEEDLE = f" The number to remember is {ANSWER}. "
QUESTION = "\n\nWhich number was to be remembered? The number to remember is"


def long_case(tokenizer, text: str, length: int, new_tokens: int, max_context_length: int, seq_len: int) -> Case:
    """Returns a prompt that has `length` tokens together with `new_tokens` of an answer.

    It is `text`, cut or repeated until it is that long, with NEEDLE in the middle and QUESTION at the end. Raises
    SmolLM3Error for a length that the model has no room for, or that has none for needle and question.
    """
    pieces = tokenizer([text, NEEDLE, QUESTION], add_special_tokens=False)["input_ids"]
    hay, needle, question = pieces
    count = length - new_tokens - len(needle) - len(question)
    least = length - count + 2
    largest = min(seq_len, max_context_length + new_tokens)
    if not hay:
        raise SmolLM3Error("the text of a long prompt is empty; name a file that has one")
    if not least <= length <= largest:
        raise SmolLM3Error(
            f"length is {length}, allowed is a whole number from {least} (needle, question and {new_tokens} new "
            f"tokens) to {largest}, what the artifact was compiled for"
        )
    hay = (hay * (count // len(hay) + 1))[:count]
    middle = count // 2
    return Case("prompt", f"{length} tokens, a needle in them", [*hay[:middle], *needle, *hay[middle:], *question])
