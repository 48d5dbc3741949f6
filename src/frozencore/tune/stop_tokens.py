"""Where an exported model stops: the tokens that end answers in training end its generation too."""

from __future__ import annotations

import json
from pathlib import Path

from frozencore.calibration.batches import stated_ids
from frozencore.errors import FrozenCoreError
from frozencore.files.atomic_write import write_json
from frozencore.files.tokenizer import has_tokenizer
from frozencore.tune.load import load_tokenizer
from frozencore.tune.rows.prompts import PromptEncoder

SETTINGS = "generation_config.json"


def add_stop_tokens(folder: Path) -> tuple[str, ...]:
    """Add the tokens that end an answer in the chat template to ``eos_token_id`` of a model folder.

    A base model may name another end token there than the one with which its template ends a turn. An answer that was
    trained on the template would then go on behind its end.

    Returns:
        The tokens that were added; none if the folder has no chat template or no generation settings.
    """
    file = folder / SETTINGS
    if not (file.is_file() and has_tokenizer(folder)):
        return ()
    tokenizer = load_tokenizer(str(folder.absolute()))
    if not tokenizer.chat_template:
        return ()
    try:
        ends = PromptEncoder(tokenizer).end_ids
    except FrozenCoreError:  # training would refuse this tokenizer, so no answer was trained with it
        return ()
    settings = json.loads(file.read_text(encoding="utf-8"))
    stated = stated_ids(settings.get("eos_token_id"))
    added = [token for token in ends if token not in stated]
    if added:
        write_json(file, {**settings, "eos_token_id": [*stated, *added]})
    return tuple(tokenizer.convert_ids_to_tokens(added))
