"""Documents packed to rows of one length: concatenated, each with its start and end tokens, cut where a row is full.

Nothing is padding and nothing is left out but a last token alone. A document may go on in the next row, and attention
runs across the documents of a row: the end token is what tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from frozencore.tune.rows.row_forms import TokenRow


def pack(documents: Sequence[TokenRow], length: int) -> list[TokenRow]:
    """Rows of ``length`` tokens, in the documents' order; the last one may be shorter.

    The loss is on every token that has one before it in its row. Ids are ``packed-1``, ``packed-2``, ...
    """
    stream = list(chain.from_iterable(document.input_ids for document in documents))
    cut = [stream[start : start + length] for start in range(0, len(stream), length)]
    return [TokenRow(f"packed-{number}", ids, 0) for number, ids in enumerate(cut, start=1) if len(ids) > 1]
