"""A part without changes that later ones supersede: what a row that was changed a million times comes to.

The part is gone through in sections of the log, each of which needs no more memory than a part. Of every key a section
leaves the first change, which says whether a row was stored before, the last one and the last row put, and the newest
row with each value that later ones left out. A row that went to a key of another part leaves the same of the time
before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from headwater.log.blocks import DELETE, INSERT, Block, Held
from headwater.log.net.decoded import DecodedChanges, decode_changes
from headwater.log.net.events import Events
from headwater.log.net.hash_parts import HashPart
from headwater.log.spill import SpillStore
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_SAMPLES = 256
"""Of the changes of a section, to find where in the log it begins and ends."""


def thinned(
    schema: TableSchema,
    part: HashPart,
    into: HashPart,
    describe: Callable[[int], str],
    cuts: Sequence[int],
    moves: Int64,
    most: int,
    store: SpillStore,
) -> None:
    """Write to `into` what `part` must keep. `cuts`: numbers of TRUNCATEs of some leaves: what is before one and what
    is after it are told apart; `moves`: those of changes that lie in two parts; `most`: changes of a section."""
    for begin, end in itertools.pairwise(_borders(part.blocks, cuts, most)):
        section = [(block, (block.sequence >= begin) & (block.sequence < end)) for block in part.blocks]
        section = [(block, mask) for block, mask in section if mask.any()]
        decoded = decode_changes(schema, section, describe)
        events = Events.of(schema, decoded)
        needed = np.sort(events.order[_needed(decoded, events, moves)])
        for block, mask in section:
            held = block.load()
            of_section = mask & np.isin(_order(held), needed, kind="sort")
            if (rows := np.flatnonzero(of_section)).size:
                into.add(block.relation, held.copied(held.starts[rows], held.ends[rows], rows), store)
    into.flush(store)


def _order(held: Held) -> Int64:
    """As of `Events.order`."""
    order: Int64 = held.sequence * 2 + (held.data[held.starts] != DELETE)
    return order


def _borders(blocks: Sequence[Block], cuts: Sequence[int], most: int) -> Iterator[int]:
    step = max(1, most // _SAMPLES)
    samples = np.sort(np.concatenate([block.sequence[::step] for block in blocks]))
    yield -1
    yield from np.unique(
        np.concatenate([samples[most // step :: max(1, most // step)], cuts]).astype(np.int64)
    ).tolist()
    yield int(np.iinfo(np.int64).max)


def _needed(decoded: DecodedChanges, events: Events, moves: Int64) -> Bool:
    """Which events are. There is one for each change: a part's updates do not change keys."""
    if (events.came_from >= 0).any():  # but for two keys with the same hash
        return np.ones(len(events.code), dtype=np.bool_)
    by = np.argsort(events.code, kind="stable")
    code, row = events.code[by], events.row[by]
    put = row >= 0
    needed = np.isin(events.order[by] // 2, moves, kind="sort")
    first = np.ones(len(by), dtype=np.bool_)
    first[1:] = code[1:] != code[:-1]
    begins = first.copy()
    begins[1:] |= needed[:-1] & ~put[:-1]
    stretch = np.cumsum(begins) - 1
    needed |= first
    needed[:-1] |= begins[1:]
    needed[-1:] = True
    inserts = (decoded.operation == INSERT)[by]
    _keep_newest(needed, stretch, put)
    for mask in decoded.unchanged.values():
        lacks = np.zeros(len(by), dtype=np.bool_)
        lacks[put] = mask[row[put]]
        needed |= lacks & inserts  # a row that came into view without them: netting has to find it
        _keep_newest(needed, stretch, put & ~lacks)
    result = np.empty(len(by), dtype=np.bool_)
    result[by] = needed
    return result


def _keep_newest(needed: Bool, stretch: Int64, which: Bool) -> None:
    """Of each stretch the last of the events `which`."""
    at = np.flatnonzero(which)
    newest = np.full(int(stretch[-1]) + 1 if len(stretch) else 0, -1, dtype=np.int64)
    newest[stretch[at]] = at
    needed[newest[newest >= 0]] = True
