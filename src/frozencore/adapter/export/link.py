"""A core of few bits in a link or a QR code: ``#core=`` and base64url of these bytes, little-endian.

    1      bits of a value: 8, 4 or 2
    16     the basis id
    2      the number of layers L
    2·L    r of each layer, in the order of the layers' names
    2·L    the scale of each layer, float16
    ...    the codes of all values (:mod:`frozencore.maths.quantise`), packed in bytes
    4      CRC-32 of all that stands before

``examples/browser`` reads it. The text of a QR code is the fragment, as bytes at the lowest error correction.
"""

from __future__ import annotations

import base64
import zlib
from importlib.util import find_spec
from pathlib import Path

from frozencore.adapter.export.lora import ExportSource, export_source
from frozencore.errors import ArtifactError, ConfigError
from frozencore.files.atomic_write import atomic_write
from frozencore.maths.quantise import BITS

LARGEST_QR = 2953
"""The bytes of the largest QR code, version 40 at level L."""


def core_fragment(directory: str | Path, bits: int) -> str:
    """The fragment of a link with an adapter's core in it.

    Args:
        directory: The adapter's folder.
        bits: Bits of a value: 8, 4 or 2.

    Raises:
        ArtifactError: The adapter is damaged.
        ConfigError: The adapter has no basis, or trains more than its cores.
    """
    return _fragment(export_source(directory), bits)


def _fragment(adapter: ExportSource, bits: int) -> str:
    few = adapter.core.in_bits(bits, adapter.ranks).packed
    assert few is not None
    head = bytes([bits]) + bytes.fromhex(adapter.basis_id) + len(adapter.layers).to_bytes(2, "little")
    content = head + b"".join(X.numpy().tobytes() for X in (few.ranks, few.scales, few.codes))
    content += zlib.crc32(content).to_bytes(4, "little")
    return "#core=" + base64.urlsafe_b64encode(content).decode().rstrip("=")


def export_qr(directory: str | Path, out: str | Path, bits: int) -> int:
    """Write a picture (PNG or SVG, by the name) of a QR code with :func:`core_fragment`.

    Returns:
        The bytes in the code.

    Raises:
        ArtifactError: The core has more bytes than a QR code.
        ConfigError: The adapter has no core alone, ``out`` is no .png or .svg, or the extra ``onnx`` is missing.
    """
    out = Path(out)
    if find_spec("segno") is None:
        raise ConfigError(
            "To write a QR code takes the package segno, which is not installed: pip install 'frozencore[onnx]'."
        )
    if out.suffix not in (".png", ".svg"):
        raise ConfigError(f"A QR code is written as .png or .svg, but --out {out} was given.")
    adapter = export_source(directory)
    fragment = _fragment(adapter, bits)
    if len(fragment) > LARGEST_QR:
        raise ArtifactError(
            f"A QR code holds {LARGEST_QR:,} bytes, and this core at {bits} bits takes {len(fragment):,}. "
            f"{_what_fits(adapter, bits)} Or send the link (--to link)."
        )
    import segno

    code = segno.make(fragment, error="l", mode="byte", boost_error=False)
    with atomic_write(out) as aside:
        code.save(str(aside), kind=out.suffix[1:], scale=4)
    return len(fragment)


def _what_fits(adapter: ExportSource, bits: int) -> str:
    fewer = [each for each in BITS if each < bits and len(_fragment(adapter, each)) <= LARGEST_QR]
    if fewer:
        return f"--bits {fewer[0]} fits."
    num_layers = len(adapter.layers)
    room = LARGEST_QR * 3 // 4 - 28 - 4 * num_layers  # 28: the head, the CRC, and `#core=` in bytes before base64
    rank = int(max(room * 8 / min(BITS) / num_layers, 0) ** 0.5)
    if rank == 0:
        return f"No rank fits with {num_layers} layers: calibrate a basis of fewer (target_modules)."
    return f"At {min(BITS)} bits a basis of rank {rank} fits."
