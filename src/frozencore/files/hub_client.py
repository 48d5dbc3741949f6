"""The hub's client: whether the hub answers, downloads and uploads. Its import takes half a second of a processor.

The client retries for up to a minute, so it is asked only once it is known that the hub answers.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Literal

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi, get_token, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.names import MODEL_CONFIG
from frozencore.text import one_line

HUB_TIMEOUT_S = 10.0
_answered: set[tuple[str, str, str]] = set()  # repositories of which a hub has answered in this process


def hub_answers(kind: Literal["model", "dataset"], name: str) -> bool:
    """Return whether the hub answers a request about a repository, with any answer; an answer is asked for once."""
    api = HfApi()
    if (kind, name, api.endpoint) in _answered:
        return True
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError:
        pass
    except Exception:  # a network can fail in many ways
        return False
    _answered.add((kind, name, api.endpoint))
    return True


def why_not_given(error: Exception) -> str:
    """Say in a few words why the hub did not return a file; the client's message is several sentences."""
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
    try:
        validate_repo_id(repository)
        fits = "/" in repository
    except HFValidationError:
        fits = False
    if not fits or get_token() is None:
        raise ConfigError(
            "--push-to-hub needs a login. Run `hf auth login`, or set HF_TOKEN."
            if fits
            else f"--push-to-hub takes the name of a repository as OWNER/NAME, but {repository!r} was given."
        )


def upload(folder: Path, repository: str) -> str:
    """Upload the files of a folder to a repository; a new repository is private.

    Returns:
        The address of the repository.

    Raises:
        ArtifactError: The upload failed; the folder stays unchanged.
    """

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


def is_cached(model: str, revision: str | None) -> bool:
    """Return whether the offline cache has a model."""
    with suppress(HFValidationError):  # not a possible name of a repository
        return isinstance(try_to_load_from_cache(model, MODEL_CONFIG, revision=revision), str)
    return False


def download(
    place: str,
    revision: str | None,
    wanted: list[str],
    *,
    instead: str,
    unless: tuple[str, ...],
    cache_dir: str | Path | None,
) -> Path:
    """The folder of a repository's files, from the hub if it answers, else from its offline cache.

    Args:
        wanted: The files.
        instead: A file that is downloaded only if the repository has none of those in ``unless``.

    Raises:
        ArtifactError: Neither has the repository.
    """
    try:
        only_here = not hub_answers("model", place)

        def fetch(names: list[str]) -> Path:
            return Path(
                huggingface_hub.snapshot_download(
                    place, revision=revision, allow_patterns=names, local_files_only=only_here, cache_dir=cache_dir
                )
            )

        folder = fetch(wanted)
        return folder if any((folder / name).is_file() for name in unless) else fetch([instead])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ArtifactError(
            f"No adapter or basis at {place}: it is neither a folder{_beside(place)} nor in the offline cache, and "
            f"{why_not_given(error)}. Give the folder of a saved one."
        ) from error


def _beside(place: str) -> str:
    """The first names in the folder that would hold this one, if there is such a folder."""
    parent = Path(place).parent
    with suppress(OSError, ValueError):
        if parent.parts and parent.is_dir():
            return f" ({parent} holds {', '.join(sorted(one.name for one in parent.iterdir())[:5])})"
    return ""
