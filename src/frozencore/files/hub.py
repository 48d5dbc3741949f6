"""Access the hub, and find out at once whether it answers: its client retries for up to a minute.

The client is imported when it is used, because the import takes a fifth of a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from frozencore.errors import ArtifactError, ConfigError, ModelError
from frozencore.files.gguf_model import find_gguf
from frozencore.text import one_line

HUB_TIMEOUT_S = 10.0
_answered: set[tuple[str, str, str]] = set()  # repositories of which a hub has answered in this process


def hub_answers(kind: Literal["model", "dataset"], name: str, *, timeout_s: float = HUB_TIMEOUT_S) -> bool:
    """Return whether the hub answers a request about a repository, with any answer; an answer is asked for once."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    if (kind, name, api.endpoint) in _answered:
        return True
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=timeout_s)
    except HfHubHTTPError:
        pass
    except Exception:  # a network can fail in many ways
        return False
    _answered.add((kind, name, api.endpoint))
    return True


def why_not_given(error: Exception) -> str:
    """Say in a few words why the hub did not return a file; the client's own message is several sentences."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    for kind, words in (
        (GatedRepoError, "its owner admits only some users"),
        (RepositoryNotFoundError, "the hub has no such repository, or it is private"),
        (LocalEntryNotFoundError, "the hub cannot be reached"),
        (HFValidationError, "the hub has no repositories of such names"),
    ):
        if isinstance(error, kind):
            return words
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return f"the hub answers with status {error.response.status_code}"
    return f"the hub does not give it ({one_line(error)})"


def require_upload(repository: str) -> None:
    """Check before any work that an upload can succeed.

    Raises:
        ConfigError: The name is not ``OWNER/NAME``, or there is no login.
    """
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        fits = is_hub_id(repository)
    except HFValidationError:
        fits = False
    if not fits:
        raise ConfigError(f"--push-to-hub takes the name of a repository as OWNER/NAME, but {repository!r} came.")
    if get_token() is None:
        raise ConfigError("--push-to-hub needs a login. Run `hf auth login`, or set HF_TOKEN.")


def upload(folder: Path, repository: str) -> str:
    """Upload the files of a folder to a repository; a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        ArtifactError: The upload failed; the folder stays unchanged.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, files = HfApi(), sorted(file for file in folder.rglob("*") if file.is_file())
    added = [CommitOperationAdd(file.relative_to(folder).as_posix(), file) for file in files]
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.create_commit(repository, added, commit_message="Upload an adapter of frozencore")
    except Exception as error:  # every way in which a network can fail
        raise ArtifactError(
            f"{folder} could not be uploaded to {repository}: {why_not_given(error)}. "
            f"It is whole: try `hf upload {repository} {folder}`."
        ) from error
    return str(address)


def is_hub_id(place: str) -> bool:
    """Return whether a name has the form of a repository, ``ORGANISATION/NAME``, and not of a path."""
    return place.count("/") == 1 and not place.startswith((".", "/", "~"))


def safe_loading(model: str) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` for a model, without its dtype.

    The hub is used only if it is needed and answers. A repository's own code is never run.

    Args:
        model: Hub id, folder, or GGUF file (:mod:`frozencore.files.gguf_model` reads its weights and tokenizer).

    Raises:
        ModelError: It is none of them, or the hub does not answer and the model is not in the cache.
    """
    file = find_gguf(model)
    if file is not None:
        place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    else:
        place = {"pretrained_model_name_or_path": model}
    only_here = file is not None or _is_folder(model) or not _hub_has(model)
    return {**place, "local_files_only": only_here, "trust_remote_code": False}


def _is_folder(model: str) -> bool:
    if Path(model).is_dir():
        return True
    if model.count("/") > 1 or model.startswith((".", "/", "~")) or not model:
        raise ModelError(
            f"Model {model}: there is no such folder. Give a folder, a GGUF file or a hub id (ORGANISATION/NAME)."
        )
    return False


def _hub_has(model: str) -> bool:
    """Return whether to use the hub; False means the cache."""
    if hub_answers("model", model):
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:  # not a possible name of a repository
        is_cached = False
    if not is_cached:
        raise ModelError(
            f"Model {model} is neither a local folder nor in the offline cache, and the hub cannot be reached. "
            "Give the folder of a downloaded model, or a network."
        )
    return False
