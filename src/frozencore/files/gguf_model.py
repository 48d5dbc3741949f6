"""Find models in GGUF files, llama.cpp's format, and read them with transformers as plain weights and a tokenizer.

Training, merging and saving work on unpacked weights, an ordinary model. Quantised weights take a minute to unpack, so
they are unpacked once, into a model folder in the user's cache. transformers and the package ``gguf`` (extra
``frozencore[gguf]``) are imported when a file is read.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import warnings
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from frozencore.errors import ArtifactError, ModelError
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.lfs_pointer import lfs_pointer_in
from frozencore.quiet import with_attributes
from frozencore.text import bytes_in_words, one_line

_MAGIC = b"GGUF"


def find_gguf(model: str) -> Path | None:
    """The absolute path of the GGUF file of a model's name; None for a model of another kind.

    Args:
        model: A file, or a folder without ``config.json`` that holds one GGUF file.

    Raises:
        ModelError: The folder holds several files, the file is missing or not GGUF, or the package ``gguf`` is missing.
    """
    place = Path(model)
    if place.suffix.lower() == ".gguf" and not place.is_dir():
        return _checked(place)
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(file for file in place.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"A model folder may hold one GGUF file, but {place} holds {names}. Name the file.")
    return _checked(files[0]) if files else None


def _checked(file: Path) -> Path:
    try:
        with file.open("rb") as opened:
            found = opened.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(f"Model {file}: {error.strerror}. Give a GGUF file, a model folder or a hub id.") from error
    if found != _MAGIC:
        raise ModelError(f"A GGUF file begins with the letters GGUF, but {file} does not. Download it again.")
    if find_spec("gguf") is None:
        raise ModelError(
            f"To read {file.name} takes the package gguf, which is not installed: pip install 'frozencore[gguf]'."
        )
    return file.absolute()


def read_weights(model_class: Any, dtype: str, loading: dict[str, Any]) -> Any:
    """Load the model in a GGUF file for training and saving; it is named after the file.

    Quantised weights come from :func:`cache_folder`, where they are unpacked first if need be.

    Args:
        model_class: A class of transformers, also an Auto class.
        dtype: ``auto`` is the file's dtype, or bfloat16 if the file is quantised.
        loading: The arguments from :func:`frozencore.files.hub.safe_loading`.
    """
    file, of_cache = file_of(loading), "bfloat16" if dtype == "auto" else dtype
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{digest[:16]}-{of_cache}"
    if not (folder / "config.json").is_file():
        if not is_quantised(file):
            return unpack_weights(model_class, dtype, loading)
        model = unpack_weights(model_class, of_cache, loading)
        try:
            with atomic_folder(folder, overwrite=True) as new:
                model.save_pretrained(new)
        except ArtifactError as error:
            warnings.warn(f"{file.name} is unpacked at each start, because {error}", stacklevel=2)
            return model
        del model
        size = bytes_in_words(sum(one.stat().st_size for one in folder.iterdir()))
        warnings.warn(
            f"{file.name} was unpacked once, to {size} of {of_cache}; the next start is fast. To remove them: "
            f"rm -r {shlex.quote(str(folder))}",
            stacklevel=2,
        )
    return _named(model_class.from_pretrained(folder, dtype=of_cache, local_files_only=True), file)


def cache_folder() -> Path:
    """The folder of unpacked models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "frozencore")


def file_of(loading: dict[str, Any]) -> Path:
    """The GGUF file that loading arguments name."""
    return Path(loading["pretrained_model_name_or_path"], loading["gguf_file"])


def is_quantised(file: Path) -> bool:
    """Whether a GGUF file has weights of fewer than 16 bits."""
    from gguf import GGMLQuantizationType, GGUFReader

    plain = {GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16}
    return any(tensor.tensor_type not in plain for tensor in GGUFReader(file).tensors)


def _named(model: Any, file: Path) -> Any:
    model.name_or_path = model.config.name_or_path = str(file)
    model.config.architectures = [type(model).__name__]  # the file has no architecture
    return model


def unpack_weights(model_class: Any, dtype: str, loading: dict[str, Any]) -> Any:
    """Load and unpack the weights in a GGUF file; the arguments are those of :func:`read_weights`."""
    import transformers

    whole = {}
    if hasattr(transformers, "GgufConfig"):  # versions that can leave the weights packed
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _without_bars():
        return _named(model_class.from_pretrained(dtype=dtype, **whole, **loading), file_of(loading))


def model_class(config: Any) -> Any:
    """transformers' class for a configuration; a configuration from a GGUF file is a causal language model.

    Raises:
        ValueError: transformers does not have the class.
    """
    import transformers

    named = (config.architectures or [""])[0]
    if not named and type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    if not hasattr(transformers, named):
        raise ValueError(f"transformers has no model class {named!r}.")
    return getattr(transformers, named)


def read_tokenizer(loading: dict[str, Any]) -> Any:
    """Load the tokenizer of any model; for a GGUF file with its chat template and its splitting of digits.

    Args:
        loading: The arguments from :func:`frozencore.files.hub.safe_loading`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(**loading)
    if "gguf_file" in loading:
        _cut_digits(tokenizer, file_of(loading))
    return tokenizer


def _cut_digits(tokenizer: Any, file: Path) -> None:
    """Split numbers into digits for a ``smollm`` vocabulary, which transformers does not do.

    The vocabulary has no token with several digits, but without the split the space before a number is tokenised
    differently.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    kind = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "smollm":
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def why_unreadable(loading: dict[str, Any], error: Exception) -> str:
    """Describe a loader's exception in one line; for a GGUF file say whether the file is complete."""
    file = Path(loading["pretrained_model_name_or_path"], loading.get("gguf_file", ""))
    if pointer := lfs_pointer_in(file):
        return pointer
    if "gguf_file" not in loading:
        return one_line(error, 200)
    from gguf import GGUFReader

    try:
        GGUFReader(file)
    except Exception:  # numpy raises several kinds for slices that are too short
        return f"its {file.stat().st_size:,} bytes are not a whole GGUF file. Download it again."
    said = f"it does not say {error}." if isinstance(error, KeyError) else one_line(error, 200)
    return f"transformers reads no such GGUF file: {said}"


def _without_bars() -> AbstractContextManager[None]:
    """Turn off the progress bar for a GGUF file, for which transformers has no setting."""
    from transformers import modeling_gguf_pytorch_utils as reader

    return with_attributes(reader, tqdm=partial(reader.tqdm, disable=True))
