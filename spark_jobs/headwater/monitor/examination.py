"""What `headwater doctor` looks at: the lake, the source if it answers, and the disk of this machine. Facts only; what
is wrong with them, `headwater.monitor.findings` says. Nothing is changed, also not a slot past its ceiling, which every
other look gives up. Without Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

from headwater.apply.small_files import choose
from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import checkpoints_of, log_path
from headwater.delta.small_tables import open_table
from headwater.errors import HeadwaterError
from headwater.gate.check import inspect
from headwater.gate.lease import is_alive
from headwater.lake.ledger import Epoch, read_epoch
from headwater.lake.look import Look
from headwater.lake.paths import table_path
from headwater.lake.reader import LakeReader
from headwater.lake.registry import Lease, PipelineRecord, Registry, TableRecord
from headwater.log import spill
from headwater.monitor.lags import Lags
from headwater.monitor.status import is_running, tables_of
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.standing import Registered
from headwater.source.connection import connect
from headwater.source.problems import Problem
from headwater.source.slot import wal_bound
from headwater.waiting.source_state import (
    SourceState,
    as_the_source_stands,
    followed,
    read_source_state,
)

_STATEMENT_SECONDS: Final = 30.0
_ENTRY: Final = re.compile(r"([0-9]{20})\.json\Z")


@dataclass(frozen=True, slots=True)
class SourceAnswers:
    """What the source said. `problems` as `check` has them, `bound`: on the log that it keeps for a slot, in bytes,
    `alive`: the names of the leases that are held, `listed`: the tables that the file's entries match."""

    state: SourceState
    problems: tuple[Problem, ...]
    bound: int | None
    alive: frozenset[str]
    listed: frozenset[str]


@dataclass(frozen=True, slots=True)
class Examined:
    """All facts of one visit. `answers` None: the source did not answer, for the reason `failure`.

    `newest`: the ledger's newest epoch, read after the slot was. `tables` as `status` shows them. `applied`: of each
    table the position that its newest commit in the lake carries; `unchecked`: commits since its newest checkpoint;
    `small`: files that are due to be made into fewer, where no driver lives that would do it.
    `free`: bytes, of the disks of the lake and of spilled changes, as this process sees them.
    """

    pipeline: Pipeline
    known: PipelineRecord | None
    look: Look
    newest: Epoch | None
    answers: SourceAnswers | None
    failure: HeadwaterError | None
    running: bool
    lag: tuple[int | None, float | None]
    tables: Mapping[str, dict[str, Any]]
    applied: Mapping[str, int]
    unchecked: Mapping[str, int]
    small: Mapping[str, int]
    leases: tuple[Lease, ...]
    free: Mapping[str, tuple[str, int]]

    @property
    def start(self) -> int:
        """Where the log has to go on: up to there the lake has everything."""
        start = self.known.start_lsn if self.known is not None else 0
        return max(start, self.newest.position.lsn if self.newest is not None else 0)


def examine(pipeline: Pipeline) -> Examined:
    """Look once. Refused where the lake is another pipeline's or a newer Headwater's; the source may be down."""
    root = pipeline.lake_path()
    lake = LakeReader(root, pipeline.name)
    registry = lake.registry()
    tables, before = followed(registry, pipeline.source.publication), lake.look()
    answers, failure = _ask(pipeline, tables, registry, before)
    # After the slot: a driver confirms only what the ledger has, so a slot that is ahead of this really is.
    newest = read_epoch(root)
    state = answers.state if answers is not None else None
    look = as_the_source_stands(lake.look(), state, lambda: followed(lake.registry(), pipeline.source.publication))
    running = is_running(state, lake, look)
    lags = Lags(look, state)
    records = registry.tables.values() if registry is not None else ()
    listed = set(answers.listed) if answers is not None else set()
    return Examined(
        pipeline=pipeline,
        known=registry.pipeline if registry is not None else None,
        look=look,
        newest=newest,
        answers=answers,
        failure=failure,
        running=running,
        lag=lags.of_pipeline(),
        tables=tables_of(pipeline, lake, look, listed, lags, running),
        applied=_applied(root, pipeline.name, records),
        unchecked=_unchecked(root, records),
        small={} if running else _small(root, records),
        leases=tuple(lease for lease in registry.leases.values() if lease.session) if registry is not None else (),
        free=_free(root),
    )


def _ask(
    pipeline: Pipeline, tables: list[Registered], registry: Registry | None, before: Look
) -> tuple[SourceAnswers | None, HeadwaterError | None]:
    try:
        session = connect(
            pipeline.conninfo(), application_name="headwater doctor", statement_timeout=_STATEMENT_SECONDS
        )
        with closing(session) as connection:
            report = inspect(connection, pipeline, pipeline.lake_path())
            leases = registry.leases.values() if registry is not None else ()
            alive = frozenset(lease.name for lease in leases if lease.session and is_alive(connection, lease.session))
            listed = frozenset(str(one.relation.name) for one in report.catalog.judged)
            state = read_source_state(connection, pipeline, tables, look_only=True).asked_behind(before)
            return SourceAnswers(state, report.problems, wal_bound(connection), alive, listed), None
    except HeadwaterError as failure:
        return None, failure


def _applied(root: str, pipeline: str, records: Iterable[TableRecord]) -> dict[str, int]:
    found = {}
    for record in records:
        with suppress(
            OSError, KeyError, TypeError, ValueError
        ):  # one that cannot be read says nothing; what fails is told elsewhere
            table = open_table(table_path(root, record.path))
            applied = table.transaction_version(record.app_id(pipeline)) if table is not None else None
            if applied is not None:
                found[record.name] = applied
    return found


def _unchecked(root: str, records: Iterable[TableRecord]) -> dict[str, int]:
    found = {}
    for record in records:
        folder = table_path(root, record.path)
        try:
            names = storage.names(log_path(folder))
        except OSError:
            continue
        newest = max(checkpoints_of(folder, names), default=-1)
        found[record.name] = sum(int(entry[1]) > newest for name in names if (entry := _ENTRY.match(name)))
    return found


def _small(root: str, records: Iterable[TableRecord]) -> dict[str, int]:
    found = {}
    for record in records:
        with suppress(OSError, KeyError, TypeError, ValueError):  # as above: what fails is told elsewhere
            files = read_snapshot(table_path(root, record.path)).files.values()
            found[record.name] = sum(len(group.files) for group in choose(files))
    return found


def _free(root: str) -> dict[str, tuple[str, int]]:
    """By use: the folder, and what is free there. A lake in a store has no bound."""
    left = storage.free(root)
    return {**({"lake": (root, left)} if left is not None else {}), "spilled changes": spill.free()}
