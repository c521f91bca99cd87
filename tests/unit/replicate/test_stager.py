"""The driver's side of staging with the real stager process, on messages written by hand and a handmade table."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from fixtures import pgoutput as pg
from fixtures.staged import staged_files
from fixtures.waiting import until
from headwater.apply import direct
from headwater.apply.direct import Fence
from headwater.apply.live_table import LiveTable
from headwater.apply.plan import Plan
from headwater.apply.staged.files import StagedFilesGone, StagedRows
from headwater.lake.paths import staged_path
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Chunk, Relation
from headwater.log.framing import Framer
from headwater.log.large import OpenBlocks, on_their_own
from headwater.log.spill import SpillFolder, SpillStore
from headwater.replicate.preapply import stager as stager_module
from headwater.replicate.preapply.decide import Staging, _Task, _Tasks
from headwater.replicate.preapply.process import Finish, Forget, Stage, StagingTarget
from headwater.replicate.preapply.stager import Stager
from headwater.schema import Column, Leaf, TableSchema, ValueType

XID, OTHER = 700, 701
SCHEMA = TableSchema(
    1, "public", "r1", (Column("v", 1, 20, -1, ValueType("int8", "bigint")),), ("v",), (Leaf(1, "public", "r1", 1),)
)


def make_table(folder: Path) -> None:
    """An empty table that is written directly."""
    columns = [{"name": "v", "type": "long", "nullable": True, "metadata": {}}]
    actions = [
        {
            "protocol": {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": ["deletionVectors"],
                "writerFeatures": ["deletionVectors"],
            }
        },
        {
            "metaData": {
                "id": "t",
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps({"type": "struct", "fields": columns}),
                "partitionColumns": [],
                "configuration": {"delta.enableDeletionVectors": "true"},
            }
        },
    ]
    (folder / "_delta_log").mkdir(parents=True)
    (folder / "_delta_log" / f"{0:020d}.json").write_text("\n".join(map(json.dumps, actions)) + "\n")


@dataclass
class Bench:
    """A framer that announces, the staging that listens, and a table to apply to."""

    root: Path
    staging: Staging
    framer: Framer
    start: Callable[[], None]
    behind: bool = False
    told: int = 0
    chunks: list[Chunk] = field(default_factory=list)

    def feed(self, *messages: bytes) -> None:
        for message in messages:
            self.framer.take([message])
            for item in self.framer.announcements():
                self.staging.announced(item)
                self.told += sum(block.changes for block in item.blocks) if isinstance(item, OpenBlocks) else 0

    def settle(self) -> None:
        """Until all that was told is staged."""
        until(lambda: sum(self.staging._done.values()) >= self.told > 0, "what was told is staged")

    def begin(self, values: range, xid: int = XID, *, first: bool = True) -> None:
        head = [pg.stream_start(xid, first=first), *([pg.relation(1, "v", xid)] if first else [])]
        self.feed(*head, *(pg.insert(1, value, xid) for value in values), pg.stream_stop())

    def staged(self) -> list[str]:
        return staged_files(str(self.root))

    def commit(self, xid: int = XID, end_lsn: int = 1000) -> StagedRows | None:
        """What staging has for the committed transaction; it is applied if there is something."""
        self.feed(pg.stream_commit(xid, end_lsn))
        (chunk,) = on_their_own(self.framer.cut())
        self.chunks.append(chunk)  # as the driver does: its file stays as long as the chunk
        rows = self.staging.collect(xid, "public.r1", SCHEMA, chunk.blocks)
        if rows is not None:
            assert self.staging.collect(xid, "public.r1", SCHEMA, chunk.blocks) is rows, "it may be asked again"
            folder, record = str(self.root / "t"), TableRecord("public.r1", "t", "active", schemas=((0, SCHEMA),))
            plan = Plan(record, folder, "app", 0, end_lsn, rows.as_changes(SCHEMA), "positional", "a test")
            state = LiveTable(folder, SCHEMA)
            applied = direct.commit(state, plan, Fence("fence", 1))
            assert (applied.version, applied.divergence) == (1, 0)
        self.staging.release(np.array([xid]))
        until(lambda: not self.staged(), "what was staged is removed")
        return rows

    def rows(self) -> list[int]:
        table = DeltaTable(str(self.root / "t"))
        found = QueryBuilder().register("t", table).execute("select v from t order by v").read_all()
        return [int(row["v"]) for row in pa.table(found).to_pylist()]


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    make_table(tmp_path / "t")

    def target(relation: Relation) -> StagingTarget | None:
        return StagingTarget("public.r1", str(tmp_path / "t"), SCHEMA) if relation.relation_id == 1 else None

    with SpillFolder(str(tmp_path)) as folder, contextlib.closing(Staging(str(tmp_path), 1 << 30, target)) as staging:
        framer = Framer(SpillStore(folder.path, 1 << 30), announce_from=10_000)
        made = Bench(tmp_path, staging, framer, lambda: staging.begin(1, folder.path, lambda: made.behind))
        if "already open" not in request.node.name.replace("_", " "):
            made.start()
        yield made
    assert not Path(staged_path(str(tmp_path)), "1").exists()


def test_what_was_staged_and_its_tail_are_linked_into_the_table(bench: Bench) -> None:
    bench.begin(range(2000))
    bench.settle()
    bench.begin(range(5000, 5010), first=False)
    rows = bench.commit()
    assert rows is not None
    assert rows.changes == 2010
    assert bench.rows() == [*range(2000), *range(5000, 5010)]


def test_a_transaction_that_was_already_open_when_the_driver_started_is_staged(bench: Bench) -> None:
    bench.begin(range(1000))
    assert not bench.staged()
    bench.start()
    bench.settle()
    assert bench.commit() is not None
    assert bench.rows() == list(range(1000))


def test_a_range_rolled_back_after_it_was_staged_is_noticed(bench: Bench) -> None:
    bench.begin(range(500))
    bench.feed(pg.stream_start(XID, first=False))
    bench.feed(*(pg.insert(1, 5000 + value, XID + 50) for value in range(500)), pg.stream_stop())
    bench.settle()
    bench.feed(pg.stream_abort(XID, XID + 50))
    assert bench.commit() is None


def test_a_range_rolled_back_before_it_was_staged_is_left_out(bench: Bench) -> None:
    bench.begin(range(500))
    bench.feed(pg.stream_start(XID, first=False), pg.insert(1, 9999, XID + 50), pg.stream_stop())
    bench.feed(pg.stream_abort(XID, XID + 50))
    bench.begin(range(500, 1000), first=False)
    bench.settle()
    assert bench.commit() is not None
    assert bench.rows() == list(range(1000))


def test_a_rolled_back_transaction_leaves_no_files_and_another_is_staged_after_it(bench: Bench) -> None:
    bench.begin(range(1000))
    bench.settle()
    bench.feed(pg.stream_abort(XID, XID))
    until(lambda: not bench.staged(), "what was staged is removed")
    bench.told = 0
    bench.begin(range(1000), OTHER)
    bench.settle()
    assert bench.commit(OTHER) is not None


def test_a_driver_that_is_behind_stages_nothing_and_goes_on_without(bench: Bench) -> None:
    bench.behind = True
    bench.begin(range(1000))
    bench.behind = False
    bench.begin(range(1000, 2000), first=False)  # not its first changes: never staged
    assert bench.commit() is None
    assert bench.chunks[-1].changes == 2000


def test_most_of_it_still_to_do_is_not_worth_waiting_for(bench: Bench) -> None:
    bench.begin(range(500))
    bench.settle()
    bench.behind = True
    bench.begin(range(500, 3000), first=False)
    assert bench.commit() is None


def test_what_somebody_has_removed_is_noticed_before_the_commit(bench: Bench) -> None:
    bench.begin(range(1000))
    bench.settle()
    for file in bench.staged():
        os.unlink(file)
    with pytest.raises(StagedFilesGone):
        bench.commit()
    bench.staging.give_up(XID, "public.r1")
    assert bench.staging.collect(XID, "public.r1", SCHEMA, bench.chunks[-1].blocks) is None
    assert not list((bench.root / "t").glob("*.parquet"))


def test_a_failed_commit_may_be_tried_again(bench: Bench) -> None:
    bench.begin(range(1000))
    bench.settle()
    bench.feed(pg.stream_commit(XID, 1000))
    (chunk,) = on_their_own(bench.framer.cut())
    rows = bench.staging.collect(XID, "public.r1", SCHEMA, chunk.blocks)
    assert rows is not None
    for _ in range(2):
        rows.link(rows.files, str(bench.root / "t"))
    assert len(list((bench.root / "t").glob("*.parquet"))) == len(rows.files)


def test_what_nobody_has_thought_of_ends_the_staging_and_not_the_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("nobody has thought of this")

    monkeypatch.setattr(Stager, "ask", fail)
    bench.begin(range(1000))
    # Before that a commit finds nothing done, and waits for nothing.
    until(lambda: "nobody has thought of this" in caplog.text, "the thread has failed")
    assert bench.commit() is None
    bench.begin(range(1000), OTHER)
    assert bench.commit(OTHER, 2000) is None


def test_a_stager_that_stands_still_holds_up_no_commit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.begin(range(1000))
    bench.settle()
    (process,) = [child for child in multiprocessing.active_children() if child.name == "headwater-stager"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(stager_module, "_LONGEST_SECONDS", 0.2)
    assert bench.commit() is None
    assert "the stager process stands still" in caplog.text
    until(lambda: not process.is_alive(), "it is gone")


def test_a_stager_that_takes_nothing_is_killed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stager = Stager("/lake")
    try:
        stager.ask(Forget(1))
        os.kill(stager._process.pid or 0, signal.SIGSTOP)
        monkeypatch.setattr(stager_module, "_LONGEST_SECONDS", 0.2)
        with pytest.raises(OSError):
            stager.ask(Stage(1, StagingTarget("t" * 1_000_000, "/t", SCHEMA), "", ()))
        until(lambda: not stager._process.is_alive(), "it is gone")
    finally:
        stager.close()


def test_what_a_commit_waits_for_goes_before_what_nobody_waits_for() -> None:
    tasks = _Tasks()
    target = StagingTarget("t", "/t", SCHEMA)
    messages: list[Stage | Finish | Forget] = [
        Stage(1, target, "", ()),
        Stage(2, target, "", ()),
        Stage(1, target, "", ()),
        Finish(2, "t", ()),
    ]
    for message in messages:
        tasks.put(_Task(message))
    tasks.close()
    taken = [task.message for task in iter(tasks.take, None)]
    assert taken == [messages[1], messages[3], messages[0], messages[2]]


def test_another_schema_at_the_commit_is_noticed(bench: Bench) -> None:
    bench.begin(range(1000))
    bench.settle()
    bench.feed(pg.stream_commit(XID, 1000))
    chunk = bench.framer.cut()
    other = TableSchema(1, "public", "r1", SCHEMA.columns, ("v",))
    assert bench.staging.collect(XID, "public.r1", other, chunk.blocks) is None


def test_a_table_that_is_not_written_directly_is_not_staged(bench: Bench) -> None:
    log = bench.root / "t" / "_delta_log" / f"{0:020d}.json"
    log.write_text(log.read_text().replace('"delta.enableDeletionVectors": "true"', '"a": "b"'))
    bench.begin(range(1000))
    assert bench.commit() is None
    assert bench.chunks[-1].is_large
