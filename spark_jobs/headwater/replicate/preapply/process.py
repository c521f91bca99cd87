"""The stager: a process of its own that decodes, nets and writes what has come of large open transactions.

It answers one message at a time and yields to everything else on the machine (nice): ordinary batches keep their
latency, and of an open transaction there is no hurry. It ends when the driver's end of the pipe is closed.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import numpy as np

from headwater import store_options
from headwater.apply.direct import obstacle
from headwater.apply.staged.files import CannotStage, StagedRows, StagedTable
from headwater.delta.delta_log import Snapshot, read_snapshot
from headwater.errors import HeadwaterError
from headwater.log.blocks import Block, Rows
from headwater.log.net.net_effect import PART_BYTES, PART_CHANGES, net_effect
from headwater.no_pandas import keep_pandas_out
from headwater.schema import TableSchema

_NICE: Final = 10


@dataclass(frozen=True, slots=True)
class StagingTarget:
    """A table that may be staged: its folder in the lake, and its schema as the registry has it."""

    name: str
    path: str
    schema: TableSchema


@dataclass(frozen=True, slots=True)
class Stage:
    """More changes of the open transaction `xid` on one table, to be staged below `folder`."""

    xid: int
    target: StagingTarget
    folder: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """The transaction has committed: the rest of its changes on the table `name`, then the result."""

    xid: int
    name: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Nothing is wanted of the transaction any more; its files are the driver's to remove."""

    xid: int


@dataclass(frozen=True, slots=True)
class StagingAnswer:
    """`refused`: why the table's share cannot be staged; `rows`: what was staged, to Finish."""

    refused: str = ""
    rows: StagedRows | None = None


class _Stager:
    def __init__(self) -> None:
        self._tables: dict[tuple[int, str], tuple[TableSchema, StagedTable]] = {}

    def answer(self, message: Stage | Finish | Forget) -> StagingAnswer:
        try:
            if isinstance(message, Forget):
                self._tables = {key: table for key, table in self._tables.items() if key[0] != message.xid}
                return StagingAnswer()
            if isinstance(message, Stage):
                self._stage(message)
                return StagingAnswer()
            schema, table = self._tables[message.xid, message.name]
            _take(table, schema, message.xid, message.blocks)
            return StagingAnswer(rows=table.result())
        except (CannotStage, HeadwaterError, OSError) as error:
            return StagingAnswer(refused=str(error))

    def _stage(self, message: Stage) -> None:
        key = message.xid, message.target.name
        if key not in self._tables:
            _refuse(read_snapshot(message.target.path))
            self._tables[key] = message.target.schema, StagedTable(message.folder, message.target.schema)
        schema, table = self._tables[key]
        _take(table, schema, message.xid, message.blocks)


def _refuse(snapshot: Snapshot) -> None:
    reason = obstacle(snapshot)
    mapping = snapshot.configuration.get("delta.columnMapping.mode", "none")
    if not reason and (snapshot.metadata.get("partitionColumns") or mapping != "none"):
        reason = "its files are partitioned, or name their columns otherwise"
    if reason:
        raise CannotStage(reason)


def _take(table: StagedTable, schema: TableSchema, xid: int, blocks: Sequence[Block]) -> None:
    for part in _slices(blocks):
        for net in net_effect(schema, part, [], _description(xid)).in_parts():
            table.take(net)


def _description(xid: int) -> Callable[[int], str]:
    return lambda sequence: f"open transaction {xid}"


def _slices(blocks: Sequence[Block]) -> Iterator[list[tuple[Block, Rows]]]:
    """The changes in the log's order, in slices that are netted in memory. Blocks of several relations overlap."""
    numbers = [block.sequence for block in blocks]
    total = sum(map(len, numbers))
    if not total:
        return
    size = sum(block.size for block in blocks)
    most = max(1, min(PART_CHANGES, total * PART_BYTES // max(size, 1)) - 1)
    ordered = np.sort(np.concatenate(numbers))
    borders = [*ordered[::most].tolist(), int(ordered[-1]) + 1]
    for begin, end in itertools.pairwise(borders):
        masks = ((block, (number >= begin) & (number < end)) for block, number in zip(blocks, numbers, strict=True))
        yield [(block, mask) for block, mask in masks if mask.any()]


def main(messages: Connection, root: str) -> None:
    """The process. Each message comes with how the store of the lake at `root` is entered now."""
    # Ctrl-C and SIGTERM of a process group are the driver's to handle: it closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICE)
    keep_pandas_out()
    store_options.be_patient()
    stager = _Stager()
    try:
        while True:
            options, message = messages.recv()
            store_options.register(root, options)
            messages.send(stager.answer(message))
    except (EOFError, OSError):
        os._exit(0)  # the driver is gone, or wants no more
