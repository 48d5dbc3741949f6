"""Names of models: folders, GGUF files and hub ids, and how they are loaded. The hub's code is never run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from frozencore.errors import ModelError
from frozencore.files.gguf_file import find_gguf
from frozencore.files.lfs_pointer import lfs_pointer_in
from frozencore.files.names import CONFIG_FILE
from frozencore.text import one_line


def begins_as_path(place: str) -> bool:
    """Return whether a name begins as a path does, and no repository's."""
    return place.startswith((".", "/", "~"))


def is_hub_id(place: str) -> bool:
    """Return whether a name has the form of a repository, ``ORGANISATION/NAME``, and not of a path."""
    return place.count("/") == 1 and not begins_as_path(place)


def hub_client() -> ModuleType:
    """:mod:`frozencore.files.hub_client`, imported when a repository is asked for: that takes half a second."""
    from frozencore.files import hub_client

    return hub_client


def safe_loading(model: str, revision: str | None = None) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a model, without its dtype.

    The hub is used only if it is needed and answers. Code in a repository is never run.

    Args:
        model: Hub id, folder, or GGUF file, which stands for the folder to which it is unpacked.
        revision: The revision of a hub id.

    Raises:
        ModelError: It is none of them, the folder has an adapter, the file cannot be read, or the hub does not answer
            and the model is not in the cache.
    """
    if (file := find_gguf(model)) is not None:
        from frozencore.files.gguf_model import unpacked  # which imports transformers

        model = str(unpacked(file))
    if (Path(model) / CONFIG_FILE).is_file():
        raise ModelError(
            f"A model is loaded without any adapter, but {model} holds one ({CONFIG_FILE}), which transformers "
            "would add to it. Name its base model, or move the adapter into a folder of its own, or merge it."
        )
    only_here = Path(model).is_dir() or not _hub_has(model, revision)
    return {
        "pretrained_model_name_or_path": model, "revision": revision or "main", "local_files_only": only_here,
        "trust_remote_code": False,
    }  # fmt: skip


def why_unreadable(loading: dict[str, Any], error: Exception) -> str:
    """Describe a loader's exception in one sentence."""
    place = Path(loading["pretrained_model_name_or_path"])
    return lfs_pointer_in(place) or f"{one_line(error, 200).rstrip('.')}."


def _hub_has(model: str, revision: str | None) -> bool:
    """Return whether to use the hub; False means the cache."""
    if model.count("/") > 1 or begins_as_path(model) or not model:
        lack = "there is no such folder"
    else:
        answers = hub_client().hub_answers("model", model)
        if answers or hub_client().is_cached(model, revision):
            return bool(answers)
        lack = "it is no folder and not in the offline cache, and the hub cannot be reached"
    raise ModelError(f"Model {model}: {lack}. Give a folder, a GGUF file or a hub id (ORGANISATION/NAME).")
