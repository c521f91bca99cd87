"""Changes copied out of a block, byte for byte."""

from __future__ import annotations

import numpy as np

from headwater.log.blocks import Bytes, Held, Int64
from headwater.log.values.wire import byte_strings


def copied(held: Held, starts: Int64, ends: Int64, rows: Int64) -> Held:
    """The byte ranges one behind the other; they are of the changes `rows`."""
    values = byte_strings(held.data, starts, ends - starts)
    _, offsets, data = values.buffers()
    borders = np.frombuffer(offsets, dtype=np.int32, count=len(values) + 1).astype(np.int64)
    bytes_: Bytes = np.frombuffer(data, dtype=np.uint8)[borders[0] : borders[-1]]
    return Held(bytes_, borders[:-1] - borders[0], borders[1:] - borders[0], held.sequence[rows])
