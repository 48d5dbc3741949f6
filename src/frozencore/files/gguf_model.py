"""Read models in GGUF files, llama.cpp's format, with transformers as plain weights and a tokenizer.

Training, merging and saving work on unpacked weights, an ordinary model. Quantised weights take a minute to unpack, so
they are unpacked once, into a model folder in the user's cache. The package ``gguf`` (extra ``frozencore[gguf]``) is
imported when a file is read.
"""

from __future__ import annotations

import hashlib
import shlex
import warnings
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as reader

from frozencore.errors import ArtifactError
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.gguf_file import cache_folder, file_of
from frozencore.files.lfs_pointer import lfs_pointer_in
from frozencore.quiet import with_attributes
from frozencore.text import bytes_in_words, one_line


def read_weights(model_class: Any, dtype: str, loading: dict[str, Any]) -> Any:
    """Load the model in a GGUF file for training and saving; it is named after the file.

    Quantised weights are read from :func:`cache_folder`, after they are unpacked there if need be.

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


def is_quantised(file: Path) -> bool:
    """Whether a GGUF file has weights of fewer than 16 bits."""
    return any(tensor.tensor_type.name not in ("F32", "F16", "BF16") for tensor in _opened(file).tensors)


def _opened(file: Path) -> Any:
    from gguf import GGUFReader  # an extra

    return GGUFReader(file)


def _named(model: Any, file: Path) -> Any:
    model.name_or_path = model.config.name_or_path = str(file)
    model.config.architectures = [type(model).__name__]  # the file has no architecture
    return model


def unpack_weights(model_class: Any, dtype: str, loading: dict[str, Any]) -> Any:
    """Load and unpack the weights in a GGUF file; the arguments are as in :func:`read_weights`."""
    whole = {}
    if hasattr(transformers, "GgufConfig"):  # versions that can leave the weights packed
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _without_bars():
        return _named(model_class.from_pretrained(dtype=dtype, **whole, **loading), file_of(loading))


def model_class(config: Any) -> Any:
    """transformers' class for a configuration; a configuration from a GGUF file is a causal language model.

    Raises:
        AttributeError: transformers does not have the class.
    """
    named = (config.architectures or [""])[0]
    if not named and type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return getattr(transformers, named)


def read_tokenizer(loading: dict[str, Any]) -> Any:
    """Load the tokenizer of any model; for a GGUF file with its chat template and its splitting of digits.

    Args:
        loading: The arguments from :func:`frozencore.files.hub.safe_loading`.
    """
    tokenizer = AutoTokenizer.from_pretrained(**loading)
    if "gguf_file" in loading:
        _cut_digits(tokenizer, file_of(loading))
    return tokenizer


def _cut_digits(tokenizer: Any, file: Path) -> None:
    """Split numbers into digits for a ``smollm`` vocabulary, which transformers does not do.

    The vocabulary has no token with several digits, but without the split the space before a number is tokenised
    differently.
    """
    kind = _opened(file).get_field("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "smollm":
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def why_unreadable(loading: dict[str, Any], error: Exception) -> str:
    """Describe a loader's exception in one sentence; for a GGUF file say whether the file is complete."""
    file = Path(loading["pretrained_model_name_or_path"], loading.get("gguf_file", ""))
    if pointer := lfs_pointer_in(file):
        return pointer
    if "gguf_file" not in loading:
        return f"{one_line(error, 200).rstrip('.')}."
    try:
        _opened(file)
    except Exception:  # numpy raises several kinds for slices that are too short
        return f"its {file.stat().st_size:,} bytes are not a whole GGUF file. Download it again."
    reason = f"it does not name {error}" if isinstance(error, KeyError) else one_line(error, 200).rstrip(".")
    return f"transformers reads no such GGUF file: {reason}."


def _without_bars() -> AbstractContextManager[None]:
    """Turn off the progress bar for a GGUF file, for which transformers has no setting."""
    return with_attributes(reader, tqdm=partial(reader.tqdm, disable=True))
