# SPDX-License-Identifier: Apache-2.0
"""What a model is judged on where its checkpoint brings no prompts of its own: prompts, chats and a text."""

from .reference import PUBLISHED_PROMPTS

PROMPTS = (
    *PUBLISHED_PROMPTS,
    "Once upon a time",
    "The three primary colours are",
    "SELECT name FROM users WHERE",
    "La capitale de l'Italie est",
    "Q: How many days are in a week?\nA:",
    "0, 1, 1, 2, 3, 5, 8,",
)
CHAT_PROMPTS = ("What is 3+4?", "Name the largest planet.", "Write one sentence about the sea.")
TEXT = (
    "A river begins as rain. The drops that fall on a hill run together, first into threads that a leaf could dam, "
    "then into a brook that children can jump over. Where two brooks meet the water is wider and slower, and it "
    "carries sand. By the time it reaches the plain, 300 kilometres from the first drop, it turns mills, waters "
    "fields and takes boats of 40 tons to the harbour. Nobody can say where the river ends and the sea begins: for an"
    " hour after high tide the salt water flows inland, and the fish of both are caught in the same net."
)
TEXT_TOKENS = 128
