# SPDX-License-Identifier: Apache-2.0
"""Writes the tokenizer in a GGUF file as transformers' files.

transformers' own reader of such tokenizers splits text by GPT-2's pattern whatever the file asks for, and leaves tokens
out that are added but not special; so the pattern is chosen here by `tokenizer.ggml.pre`, and others are not guessed.
Reference: llama.cpp's src/llama-vocab.cpp; the tokenizer.json of Llama 3 and of SmolLM.
"""

from pathlib import Path
from typing import Any

TOKENIZER = "tokenizer.ggml."
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # of llama.cpp's types of tokens
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = ("smaug-bpe", "llama-bpe", "llama3", "llama-v3")  # SmolLM3-3B's files say smaug-bpe
SMOLLM = "smollm"
ADD_BOS = LLAMA3[1:]  # where the file does not say it
INSTEAD = "copy tokenizer.json and tokenizer_config.json of the original model into the folder"


def token_ids(metadata: dict[str, Any]) -> dict[str, int | None]:
    """Returns config.json's ids of the special tokens; None, against a default, for one that the file does not name."""
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: metadata.get(f"{TOKENIZER}{key}") for name, key in names.items()}


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> list[str]:
    """Writes the tokenizer into `folder`; where this cannot be done it returns a line that says what to do."""
    model, pre = metadata.get(f"{TOKENIZER}model"), metadata.get(f"{TOKENIZER}pre")
    if model is None:
        return [f"the file has no tokenizer: {INSTEAD}"]
    if model != "gpt2" or pre not in (*LLAMA3, SMOLLM):
        return [f"its tokenizer ({model!r}, split as {pre!r}) is not one that is known here: {INSTEAD}"]
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = _tokenizer(metadata, pre)
        tokens = metadata[f"{TOKENIZER}tokens"]
        special = {
            name.removesuffix("_id"): tokens[token_id]
            for name, token_id in token_ids(metadata).items()
            if token_id is not None
        }
    except (KeyError, ValueError, IndexError, TypeError) as error:
        return [f"its tokenizer is not whole ({error!r}): {INSTEAD}"]
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.get("smollm3.context_length"),
        **special,
    ).save_pretrained(folder)
    return []


def _tokenizer(metadata: dict[str, Any], pre: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
    from tokenizers.models import BPE

    tokens, kinds = metadata[f"{TOKENIZER}tokens"], metadata[f"{TOKENIZER}token_type"]
    if len(tokens) != len(kinds):
        raise ValueError(f"{len(tokens)} tokens and {len(kinds)} types")
    vocab = {token: token_id for token_id, (token, kind) in enumerate(zip(tokens, kinds)) if kind != UNUSED}
    if len(vocab) != len(kinds) - list(kinds).count(UNUSED):
        raise ValueError("a token stands in it twice")
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{TOKENIZER}merges"]]
    # Llama 3 takes a whole word that is a token, whether or not merges lead to it
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in LLAMA3))
    if pre in LLAMA3:
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        split = pre_tokenizers.Digits(individual_digits=True)
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL)])
    if metadata.get(f"{TOKENIZER}add_bos_token", pre in ADD_BOS):
        bos_token_id = metadata[f"{TOKENIZER}bos_token_id"]
        bos = tokens[bos_token_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_token_id)]
        )
    return tokenizer
