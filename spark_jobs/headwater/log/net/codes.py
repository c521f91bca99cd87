"""Numbers for the distinct keys of a table's changes: with them the net effect is told by numpy over whole columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.key_equality import comparable
from headwater.log.values.wire import fixed, integers

Int64 = npt.NDArray[np.int64]


def key_codes(new: pa.Table, old: pa.Table) -> tuple[Int64, Int64, int]:
    """Number the keys of both tables together: codes of `new`, codes of `old`, and a number above all of them.

    The same keys (`headwater.key_equality`) have the same code, other keys others; not every number need be a code.
    """
    codes, above = np.zeros(new.num_rows + old.num_rows, dtype=np.int64), 1
    for name in new.column_names:
        column, size = _numbered([*new[name].chunks, *old[name].chunks])
        if above > 1:
            # Renumbering keeps the product of the columns' sizes within 64 bits.
            column, size = _numbered([fixed(pa.int64(), codes * size + column, None)])
        codes, above = column, size
    return codes[: new.num_rows], codes[new.num_rows :], above


def _numbered(chunks: Sequence[pa.Array]) -> tuple[Int64, int]:
    """Each value's number, and one above all of them."""
    if not any(map(len, chunks)):
        return np.zeros(0, dtype=np.int64), 1
    dense = _dense(chunks)
    if dense is not None:
        return dense
    encoded = pa.chunked_array([comparable(chunk) for chunk in chunks]).dictionary_encode(null_encoding="encode")
    indices = [integers(chunk.indices) for chunk in encoded.chunks if len(chunk)]
    return np.concatenate(indices), len(encoded.chunks[-1].dictionary)


def _dense(chunks: Sequence[pa.Array]) -> tuple[Int64, int] | None:
    """Integers that lie close together, as those of a sequence do, are numbers already."""
    if not pa.types.is_integer(chunks[0].type) or any(chunk.null_count for chunk in chunks):
        return None
    values = np.concatenate([integers(chunk) for chunk in chunks if len(chunk)])
    lowest, highest = int(values.min()), int(values.max())
    return (values - lowest, highest - lowest + 1) if highest - lowest < 2 * len(values) else None
