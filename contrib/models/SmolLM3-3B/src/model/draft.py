# SPDX-License-Identifier: Apache-2.0
"""A draft: the small model that guesses what the model verifies, see generate/speculation.py. Imports no torch.

It is a SmolLM3, or a Llama, which is one without NoPE layers. Its tokens are the model's by their ids: so both have one
vocabulary.
"""

from pathlib import Path
from typing import Any

from ..errors import SmolLM3Error
from .config import DRAFT_TYPES, CheckpointConfig, read_config
from .json_files import read_json

TOKENIZER = "tokenizer.json"


def read_draft(folder: Path, model_folder: Path, seq_len: int) -> CheckpointConfig:
    """Returns the config of the draft in `folder` for the model in `model_folder`.

    Raises SmolLM3Error for a folder that is no checkpoint of a SmolLM3 or Llama, or that does not fit.
    """
    draft, model = read_config(folder, DRAFT_TYPES), read_config(model_folder)
    try:
        check_draft(draft, model)
        if seq_len > draft.longest_sequence:
            raise SmolLM3Error(
                f"it has {draft.longest_sequence} positions and seq_len is {seq_len}: choose a shorter seq_len, or "
                "another draft"
            )
        if both := _vocabularies(folder, model_folder):
            _check_vocabulary(*both)
    except SmolLM3Error as error:
        raise SmolLM3Error(f"draft {folder}: {error}") from None
    return draft


def check_draft(draft: Any, model: Any) -> None:
    """Raises SmolLM3Error for configs, with the names of config.json, that do not go together."""
    if draft.vocab_size != model.vocab_size:
        raise SmolLM3Error(
            f"its vocab_size is {draft.vocab_size} and the model's {model.vocab_size}: a draft has the model's "
            "vocabulary, take another"
        )
    for of, config in (("it", draft), ("the model", model)):
        if getattr(config, "use_sliding_window", False) and config.sliding_window is not None:
            raise SmolLM3Error(
                f"{of} has a sliding_window of {config.sliding_window}, which was never checked with a draft"
            )


def check_with_draft(config: Any) -> None:
    """Raises SmolLM3Error where an InferenceConfig has no draft that it asks for, or one that does not go with it."""
    if not config.neuron_config.enable_fused_speculation:
        return
    if config.fused_spec_config is None:
        raise SmolLM3Error("enable_fused_speculation is on without a fused_spec_config, which names the draft")
    try:
        check_draft(config.fused_spec_config.draft_config, config)
    except SmolLM3Error as error:
        raise SmolLM3Error(f"draft {config.fused_spec_config.draft_model_path}: {error}") from None


def other_added_tokens(folder: Path, model_folder: Path) -> list[int]:
    """Lists the ids of added tokens, such as those of a chat, that are others in the model's tokenizer.json.

    There are none to be compared where one of the two has no such file. A draft guesses such a token wrong, and that is
    all: what the model verifies stays right.
    """
    both = _vocabularies(folder, model_folder)
    if not both:
        return []
    (_, draft), (_, model) = both
    return sorted(id_ for id_ in draft.keys() | model.keys() if draft.get(id_) != model.get(id_))


def _vocabularies(*folders: Path) -> list[tuple[dict[int, str], dict[int, str]]]:
    """Returns each folder's, see below, or none of them where one has no tokenizer.json."""
    files = [Path(folder, TOKENIZER) for folder in folders]
    return [_vocabulary(file) for file in files] if all(file.is_file() for file in files) else []


def _vocabulary(file: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Returns the tokens by their ids: those of the text itself, and those that are added beside them."""
    content = read_json(file)
    try:
        added = {token["id"]: token["content"] for token in content["added_tokens"]}
        tokens = {id_: token for token, id_ in content["model"]["vocab"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise SmolLM3Error(f"{file}: not a tokenizer with a vocabulary ({error!r}); download it again") from None
    return {id_: token for id_, token in tokens.items() if id_ not in added}, added


def _check_vocabulary(draft: tuple[dict[int, str], Any], model: tuple[dict[int, str], Any]) -> None:
    """Raises SmolLM3Error for the first token of a text that is another for the model."""
    ids = (draft[0].keys() | model[0].keys()) - (draft[1].keys() | model[1].keys())
    for id_ in sorted(ids):
        theirs, ours = draft[0].get(id_), model[0].get(id_)
        if theirs != ours:
            raise SmolLM3Error(
                f"token {id_} is {theirs!r:.40} in its {TOKENIZER} and {ours!r:.40} in the model's: it guesses in "
                "another vocabulary, take another draft"
            )
