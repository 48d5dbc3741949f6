"""Unpack models in GGUF files, llama.cpp's format, into model folders, as which they are then read.

Training, merging and saving work on an ordinary model. Unpacking takes a minute or more, and the package ``gguf``
(extra ``frozencore[gguf]``) half a minute for the words of a large vocabulary alone. So a file is unpacked once, into
the user's cache.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import transformers
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as reader

from frozencore.attributes import with_attributes
from frozencore.errors import ArtifactError, ModelError
from frozencore.files.atomic_write import atomic_folder, remove_left, require_writable, write_json
from frozencore.files.gguf_file import cache_folder
from frozencore.files.names import MODEL_CONFIG, TOKENIZER_FILE
from frozencore.text import one_line


def unpacked(file: Path) -> Path:
    """The folder of the model in a GGUF file, which is unpacked there if it was not before.

    The folder is in :func:`cache_folder`; if that cannot be written, it is removed when the process ends.

    Raises:
        ModelError: The file is damaged, or transformers does not know its architecture.
    """
    about = file.stat()
    version = file, about.st_size, about.st_mtime_ns
    folder = cache_folder() / "gguf" / _digest(*version)[:16]
    if (folder / MODEL_CONFIG).is_file():
        return folder
    try:
        require_writable(folder.parent)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder.parent}.lock"):  # of several processes one unpacks
            if not (folder / MODEL_CONFIG).is_file():
                remove_left(folder.parent)
                with atomic_folder(folder, overwrite=True) as new:
                    warnings.warn(
                        f"{file.name} is unpacked, once and for minutes if it is large. To remove it afterwards: "
                        f"rm -r {shlex.quote(str(folder))}",
                        stacklevel=3,
                    )
                    unpack(file, new)
    except ArtifactError as error:
        warnings.warn(f"{file.name} is unpacked at each start, because {error}", stacklevel=3)
        return _unpacked_for_this_process(*version)
    return folder


@cache
def _digest(file: Path, size: int, time_ns: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@cache
def _unpacked_for_this_process(file: Path, size: int, time_ns: int) -> Path:
    folder = Path(mkdtemp(prefix="frozencore-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    unpack(file, folder)
    return folder


def unpack(file: Path, folder: Path) -> None:
    """Write the model in a GGUF file into a folder: quantised weights in bfloat16, others in their own dtype.

    Raises:
        ModelError: As of :func:`unpacked`.
    """
    import gguf  # an extra

    whole = {}
    if hasattr(transformers, "GgufConfig"):  # versions that can leave the weights packed
        whole["quantization_config"] = transformers.GgufConfig(dequantize=True)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read_once = with_attributes(gguf, GGUFReader=cache(gguf.GGUFReader))  # transformers reads a file three times
    without_bar = with_attributes(reader, tqdm=partial(reader.tqdm, disable=True))  # for which there is no setting
    with read_once, without_bar, _explained(file, gguf.GGUFReader):
        contents = gguf.GGUFReader(str(file))
        is_quantised = any(tensor.tensor_type.name not in ("F32", "F16", "BF16") for tensor in contents.tensors)
        dtype = "bfloat16" if is_quantised else "auto"
        model = AutoModelForCausalLM.from_pretrained(dtype=dtype, local_files_only=True, **whole, **place)
        tokenizer = AutoTokenizer.from_pretrained(local_files_only=True, **place)
        _cut_digits(tokenizer, contents)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _keep_tokenizer(folder)


@contextmanager
def _explained(file: Path, reads: Callable[[str], Any]) -> Iterator[None]:
    """Say of any error whether the file is complete; of a damaged one numpy, gguf and transformers raise many kinds."""
    try:
        yield
    except Exception as error:
        reason = f"it does not name {error}" if isinstance(error, KeyError) else one_line(error, 200).rstrip(".")
        reason = f"transformers reads no such GGUF file: {reason}."
        try:
            reads(str(file))
        except Exception:  # numpy raises several kinds for slices that are too short
            reason = f"its {file.stat().st_size:,} bytes are not a whole GGUF file. Download it again."
        raise ModelError(f"{file} cannot be read: {reason}") from error


def _cut_digits(tokenizer: Any, contents: Any) -> None:
    """Split numbers into digits for a ``smollm`` vocabulary, which transformers does not do.

    The vocabulary has no token with several digits, but without the split the space before a number is tokenised
    differently.
    """
    kind = contents.get_field("tokenizer.ggml.pre")
    if kind is None or kind.contents() != "smollm":
        return
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def _keep_tokenizer(folder: Path) -> None:
    """Have ``tokenizer.json`` read as it is: classes of models, as Gemma's, replace parts of it by their own."""
    file = folder / TOKENIZER_FILE
    settings = json.loads(file.read_text(encoding="utf-8"))
    write_json(file, {**settings, "tokenizer_class": "PreTrainedTokenizerFast"})
