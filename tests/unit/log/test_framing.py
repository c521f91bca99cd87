"""Whatever the server interleaves, out come whole committed transactions in commit order; else the framer stops.

The histories are those of `fixtures.pgoutput.Traffic`, whose model knows nothing of segments, blocks and files.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures import pgoutput as pg
from headwater.errors import BadValue, HeadwaterError
from headwater.log import large
from headwater.log.blocks import BLOCK_CHANGES, Block, Chunk, Ddl, Relation, RelationColumn, Transactions
from headwater.log.framing import Framer, ProtocolError
from headwater.log.large import Gone
from headwater.log.net.net_effect import net_effect
from headwater.log.spill import SpillFolder, SpillStore, spill_files
from headwater.log.transactions import FirstChanges, TransactionManager
from headwater.schema import Column, Leaf, TableSchema, ValueType

ONE, TWO = 1, 2
SCHEMA = TableSchema(
    ONE,
    "public",
    "r1",
    (Column("v", 1, 20, -1, ValueType("int8", "bigint")),),
    ("v",),
    (Leaf(ONE, "public", "r1", 1),),
)


def described(*relation_ids: int) -> Ddl:
    return Ddl(is_told=False, described=frozenset(relation_ids))


def fed(messages: list[bytes], framer: Framer | None = None) -> Framer:
    framer = framer or Framer()
    framer.take(messages)
    return framer


def after(*messages: bytes) -> list[tuple[int, list[pg.Change]]]:
    return pg.changes_of(fed(list(messages)).cut())


def in_runs(framer: Framer, messages: list[bytes], seed: int) -> list[Chunk]:
    """The chunks, with runs and cuts at random places."""
    order, chunks, at = random.Random(seed), [], 0
    while at < len(messages):
        size = order.choice([1, 2, 5, 40, 1000])
        framer.take(messages[at : at + size])
        at += size
        if framer.has_chunk and order.random() < 0.5:
            chunks.append(framer.cut())
    chunks.append(framer.cut())
    return chunks


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
def test_interleaved_transactions_come_out_whole_in_commit_order_without_what_was_rolled_back(
    seed: int, steps: int
) -> None:
    traffic = pg.Traffic(seed).run(steps)
    chunks = in_runs(Framer(), traffic.messages, seed)
    assert [t for chunk in chunks for t in pg.changes_of(chunk)] == traffic.expected


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_transactions_that_went_to_disk_come_out_the_same(tmp_path: Path, seed: int) -> None:
    traffic = pg.Traffic(seed).run(60)
    with SpillFolder(str(tmp_path)) as folder:
        store = SpillStore(folder.path, 1 << 30)
        framer = Framer(store, open_bytes=300)
        chunks = in_runs(framer, traffic.messages, seed)
        assert [t for chunk in chunks for t in pg.changes_of(chunk)] == traffic.expected
        kept = {file.path for chunk in chunks for file in spill_files(chunk.blocks)}
        assert {str(path) for path in Path(folder.path).iterdir()} >= kept
    assert not Path(folder.path).exists()


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_large_transactions_stand_alone_and_what_was_told_of_them_can_be_compared(tmp_path: Path, seed: int) -> None:
    traffic = pg.Traffic(seed).run(60)
    told: dict[int, dict[tuple[str, int] | None, Block]] = {}
    chunks: list[Chunk] = []
    with SpillFolder(str(tmp_path)) as folder:
        framer = Framer(SpillStore(folder.path, 1 << 30), announce_from=150)
        for message in traffic.messages:
            framer.take([message])
            for item in framer.announcements():
                if isinstance(item, Gone):
                    assert told.pop(item.xid)
                else:
                    told.setdefault(item.xid, {}).update((large.place_of(block), block) for block in item.blocks)
        whole = framer.cut()
        chunks = large.on_their_own(whole)
        assert [t for chunk in chunks for t in pg.changes_of(chunk)] == traffic.expected
        assert chunks[-1].read_position == whole.read_position
        assert sum(chunk.changes for chunk in chunks) == whole.changes
        assert sum(chunk.size for chunk in chunks) == whole.size, "what the reader counts is given back"
        for chunk in chunks:
            if not chunk.is_large:
                continue
            (xid,) = chunk.transactions.xid.tolist()
            base = int(chunk.transactions.first_sequence[0])
            announced = told.get(xid, {})
            for block in chunk.blocks:
                before = announced.get(large.place_of(block))
                if before is not None and large.rolled_back_of(before) == large.rolled_back_of(block):
                    assert (before.sequence + base).tolist() == block.sequence.tolist()


def test_files_of_rolled_back_transactions_are_gone_at_once(tmp_path: Path) -> None:
    with SpillFolder(str(tmp_path)) as folder:
        framer = Framer(SpillStore(folder.path, 1 << 30), open_bytes=100)
        fed(
            [pg.stream_start(5, first=True), pg.relation(ONE, "v", 5)]
            + [pg.insert(ONE, number, 5) for number in range(100)]
            + [pg.stream_stop()],
            framer,
        )
        assert list(Path(folder.path).iterdir())
        framer.take([pg.stream_abort(5, 5)])
        assert not list(Path(folder.path).iterdir())


def test_a_file_of_which_everything_was_rolled_back_goes_at_the_commit(tmp_path: Path) -> None:
    with SpillFolder(str(tmp_path)) as folder:
        framer = Framer(SpillStore(folder.path, 1 << 30), open_bytes=100)
        inserts = [pg.insert(ONE, number, 6) for number in range(100)]
        fed([pg.stream_start(5, first=True), pg.relation(ONE, "v", 6), *inserts, pg.stream_stop()], framer)
        assert list(Path(folder.path).iterdir())
        framer.take([pg.stream_abort(5, 6), pg.stream_commit(5, 100)])
        assert pg.changes_of(framer.cut()) == [(5, [])]
        assert not list(Path(folder.path).iterdir())


def test_an_ordinary_transaction_of_many_runs_is_whole_and_its_blocks_are_small() -> None:
    framer = fed([pg.relation(ONE, "v"), pg.begin(7, 100)])
    for first in range(0, 50_000, 5_000):
        framer.take([pg.insert(ONE, number) for number in range(first, first + 5_000)])
        assert not framer.has_chunk
    framer.take([pg.commit(100)])
    chunk = framer.cut()
    assert [block.changes for block in chunk.blocks] == [BLOCK_CHANGES] * 3 + [50_000 - 3 * BLOCK_CHANGES]
    assert pg.changes_of(chunk) == [(7, [(ONE, "v", number) for number in range(50_000)])]


def test_a_nested_subtransaction_goes_with_the_one_around_it() -> None:
    assert after(
        pg.stream_start(10, first=True),
        pg.relation(ONE, "v", 10),
        pg.insert(ONE, 1, 10),
        pg.insert(ONE, 2, 11),
        pg.insert(ONE, 3, 12),  # inside 11
        pg.stream_stop(),
        pg.stream_abort(10, 11),
        pg.stream_start(10, first=False),
        pg.insert(ONE, 4, 13),
        pg.stream_stop(),
        pg.stream_commit(10, 50),
    ) == [(10, [(ONE, "v", 1), (ONE, "v", 4)])]


def test_a_relation_described_in_an_aborted_transaction_is_unknown_to_others() -> None:
    framer = fed(
        [
            pg.stream_start(10, first=True),
            pg.relation(ONE, "w", 10),
            pg.insert(ONE, 1, 10),
            pg.stream_stop(),
            pg.stream_abort(10, 10),
            pg.begin(11, 100),
        ]
    )
    with pytest.raises(ProtocolError, match="relation 1, which was never described"):
        framer.take([pg.insert(ONE, 2)])


@pytest.mark.parametrize("again", ["v", "w"])
def test_a_relation_that_is_described_once_more_as_before_may_be_another_one(again: str) -> None:
    """One that is described otherwise is seen to be."""
    framer = fed([pg.begin(10, 100), pg.relation(ONE, "v"), pg.insert(ONE, 1), pg.commit(100)])
    framer.cut()
    framer.take([pg.begin(11, 200), pg.insert(ONE, 2), pg.commit(200)])
    assert framer.cut().ddl is None
    framer.take([pg.begin(12, 300), pg.relation(ONE, again), pg.insert(ONE, 3), pg.commit(300)])
    assert framer.cut().ddl == (described(ONE) if again == "v" else None)
    streamed = [pg.stream_start(13, first=True), pg.relation(ONE, again, 13), pg.insert(ONE, 4, 13), pg.stream_stop()]
    framer.take(streamed)
    assert framer.cut().ddl is None
    framer.take([pg.stream_commit(13, 400)])
    assert framer.cut().ddl == described(ONE)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_relation_that_a_connection_describes_first_may_be_another_one_than_was_loaded(streamed: bool) -> None:
    def sent(xid: int, end: int, relation_id: int) -> list[bytes]:
        if streamed:
            start, stop = pg.stream_start(xid, first=True), [pg.stream_stop(), pg.stream_commit(xid, end)]
            return [start, pg.relation(relation_id, "v", xid), pg.insert(relation_id, 1, xid), *stop]
        return [pg.begin(xid, end), pg.relation(relation_id, "v"), pg.insert(relation_id, 1), pg.commit(end)]

    framer = fed([*sent(10, 100, ONE), *sent(11, 200, TWO)])
    assert framer.cut().ddl == described(ONE, TWO)
    framer.reconnected()
    assert framer.cut().ddl is None
    framer.take(sent(12, 300, ONE))
    assert framer.cut().ddl == described(ONE)


def test_a_million_savepoints_take_little_memory() -> None:
    first = FirstChanges()
    tracemalloc.start()
    for number in range(100_000):
        first.saw(1000 + number, number)
    memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert memory < 20 * 100_000
    first.saw(500, 100_000)  # the number of a transaction is given before that of the ones inside it
    assert [first.forget(xid) for xid in (500, 100_999, 51_000, 99_999)] == [100_000, 99_999, 50_000, None]
    first.saw(60_001, 50_000)  # inside of 60,000, which changes something only behind its end
    first.saw(60_000, 50_001)
    assert [first.forget(xid) for xid in (60_000, 60_001, 1000, 1001)] == [50_001, 50_000, 0, None]


def test_columns_in_another_order_may_have_swapped_their_names() -> None:
    """A partition has an order of its own, so who compares its columns with the table's cannot tell."""
    key, a, b = (RelationColumn(name, 20, -1, name == "k") for name in ("k", "a", "b"))
    before = Relation(ONE, "public", "r1", "d", (key, a, b))
    for columns, hint in (((key, b, a), described(ONE)), ((key, a), None), ((key, a, b._replace(typmod=5)), None)):
        manager = TransactionManager()
        manager.describe(before)
        manager.cut(0)
        manager.describe(replace(before, columns=columns))
        assert manager.cut(0).ddl == hint


def test_a_description_older_than_another_does_not_come_back_at_the_commit() -> None:
    assert after(
        pg.stream_start(10, first=True),
        pg.relation(ONE, "old", 10),
        pg.insert(ONE, 1, 10),
        pg.stream_stop(),
        pg.begin(11, 100),
        pg.relation(ONE, "new"),
        pg.insert(ONE, 2),
        pg.commit(100),
        pg.stream_commit(10, 200),
        pg.begin(12, 300),
        pg.insert(ONE, 3),
        pg.commit(300),
    ) == [(11, [(ONE, "new", 2)]), (10, [(ONE, "old", 1)]), (12, [(ONE, "new", 3)])]


def test_truncates_of_several_tables_keep_their_place_and_their_options() -> None:
    chunk = fed(
        [
            pg.relation(ONE, "v"),
            pg.begin(9, 100),
            pg.insert(ONE, 1),
            pg.truncate((ONE, TWO), options=3),
            pg.insert(ONE, 2),
            pg.commit(100),
            pg.stream_start(10, first=True),
            pg.truncate((TWO,), xid=10),
            pg.truncate((ONE,), xid=11),
            pg.stream_stop(),
            pg.stream_abort(10, 11),
            pg.stream_commit(10, 200),
        ]
    ).cut()
    first, second = chunk.truncates
    assert (first.relation_ids, first.cascade, first.restart_identity) == ((ONE, TWO), True, True)
    assert (second.relation_ids, second.cascade, second.restart_identity) == ((TWO,), False, False)
    (block,) = chunk.blocks
    before, behind = block.sequence.tolist()
    assert before < first.sequence < behind < second.sequence
    assert chunk.transactions.index_of(np.array([first.sequence, second.sequence])).tolist() == [0, 1]


def test_a_marker_asks_for_a_chunk_and_moves_the_read_position_only_outside_of_transactions() -> None:
    framer = fed([pg.logical_message("headwater", 500)])
    assert (framer.has_chunk, framer.demand, framer.read_position) == (True, True, 500)
    framer.cut()
    framer.take([pg.logical_message("other", 600), pg.begin(5, 1000)])
    assert (framer.demand, framer.read_position) == (False, 600)
    framer.take([pg.logical_message("headwater", 900, transactional=True)])
    assert (framer.has_chunk, framer.demand, framer.read_position) == (False, True, 600)


def test_a_marker_in_a_transaction_in_progress_counts_at_its_commit() -> None:
    marker = pg.logical_message("headwater", 9, transactional=True, xid=5)
    framer = fed([pg.stream_start(5, first=True), marker, pg.stream_stop()])
    assert not framer.demand
    framer.take([pg.stream_commit(5, 100)])
    assert framer.demand


def test_origins_and_types_change_nothing() -> None:
    assert after(
        pg.begin(5, 100),
        pg.origin(),
        pg.type_message(),
        pg.relation(ONE, "v"),
        pg.insert(ONE, 1),
        pg.commit(100),
        pg.stream_start(6, first=True),
        pg.origin(),
        pg.type_message(6),
        pg.insert(ONE, 2, 6),
        pg.stream_stop(),
        pg.stream_commit(6, 200),
    ) == [(5, [(ONE, "v", 1)]), (6, [(ONE, "v", 2)])]


def test_the_abort_of_what_has_never_begun_is_nothing_to_do() -> None:
    """18 tells of the subtransactions of a transaction that it found rolled back before it had sent any of it."""
    assert after(
        pg.stream_abort(5, 6),
        pg.stream_abort(5, 5),
        pg.relation(ONE, "v"),
        pg.begin(7, 100),
        pg.insert(ONE, 1),
        pg.commit(100),
    ) == [(7, [(ONE, "v", 1)])]


def test_after_a_reconnect_what_was_open_is_forgotten_and_what_had_committed_stays() -> None:
    framer = fed([pg.relation(ONE, "v"), pg.begin(5, 100), pg.insert(ONE, 1), pg.commit(100)])
    framer.take([pg.stream_start(6, first=True), pg.insert(ONE, 2, 6), pg.stream_stop()])
    framer.take([pg.begin(7, 200), pg.insert(ONE, 3)])
    assert framer.last_commit == 100
    framer.reconnected()
    framer.take([pg.begin(7, 200), pg.relation(ONE, "v"), pg.insert(ONE, 3), pg.commit(200)])
    framer.take([pg.stream_start(6, first=True), pg.insert(ONE, 2, 6), pg.stream_stop(), pg.stream_commit(6, 300)])
    assert pg.changes_of(framer.cut()) == [(5, [(ONE, "v", 1)]), (7, [(ONE, "v", 3)]), (6, [(ONE, "v", 2)])]


IN_TRANSACTION = [pg.relation(ONE, "v"), pg.begin(5, 100)]
IN_SEGMENT = [pg.stream_start(5, first=True), pg.relation(ONE, "v", 5)]
VIOLATIONS: dict[str, tuple[list[bytes], str]] = {
    "a change outside of a transaction": ([pg.relation(ONE, "v"), pg.insert(ONE, 1)], "a change outside"),
    "a truncate outside of a transaction": ([pg.truncate((ONE,))], "a change outside"),
    "a change of an unknown relation": ([*IN_TRANSACTION, pg.insert(TWO, 1)], "relation 2, which was never described"),
    "a transaction inside another": ([*IN_TRANSACTION, pg.begin(6, 200)], "begins inside another"),
    "a commit without a transaction": ([pg.commit(100)], "a commit without a transaction"),
    "a commit that was not announced": ([*IN_TRANSACTION, pg.commit(101)], "did not announce"),
    "commits that go back": ([*IN_TRANSACTION, pg.commit(100), pg.begin(6, 90), pg.commit(90)], "commit 0/5A after"),
    "the same commit twice": ([*IN_TRANSACTION, pg.commit(100), pg.begin(5, 100), pg.commit(100)], "commit 0/64 after"),
    "a streamed commit that goes back": ([*IN_SEGMENT, pg.stream_stop(), pg.stream_commit(5, 0)], "commit 0/0 after"),
    "an unknown message": ([pg.framed(b"?")], r"unknown message '\?'"),
    "an unknown message in a segment": ([*IN_SEGMENT, pg.framed(b"?")], r"unknown message '\?'"),
    "a two-phase message": ([pg.framed(b"b" + bytes(30))], "unknown message 'b'"),
    "a message without content": ([pg.framed(b"")], "without content"),
    "a message that is no data": ([b"k" + bytes(30)], "no log data"),
    "a segment inside a transaction": ([*IN_TRANSACTION, pg.stream_start(6, first=True)], "inside another"),
    "a segment inside a segment": ([*IN_SEGMENT, pg.stream_start(6, first=True)], "inside another"),
    "a begin inside a segment": ([*IN_SEGMENT, pg.begin(6, 100)], "border inside a segment"),
    "a transaction in progress that begins twice": (
        [*IN_SEGMENT, pg.stream_stop(), pg.stream_start(5, first=True)],
        "transaction 5 begins twice",
    ),
    "a segment of a transaction that never began": ([pg.stream_start(5, first=False)], "5 was never begun"),
    "the end of a segment without its start": ([pg.stream_stop()], "without its start"),
    "the commit of a transaction that never began": ([pg.stream_commit(5, 10)], "transaction 5, which was never begun"),
    "a truncate that claims too much": ([pg.begin(5, 100), pg.truncate((ONE,))[:-1]], "within a number"),
    "a relation of unknown identity": ([pg.relation(ONE, "v").replace(b"r1\0d", b"r1\0z")], "unknown replica identity"),
    "bytes behind a relation": ([pg.relation(ONE, "v") + b"x"], "1 bytes too many"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
@pytest.mark.parametrize("one_by_one", [True, False])
def test_what_no_server_sends_stops_with_its_position_and_its_first_bytes(name: str, one_by_one: bool) -> None:
    messages, told = VIOLATIONS[name]
    framer, last = Framer(), messages
    if one_by_one:
        last = messages[-1:]
        for message in messages[:-1]:
            framer.feed(message)
    with pytest.raises(ProtocolError, match=told) as stopped:
        framer.take(last)
    assert str(stopped.value).startswith("log position ")
    shown = str(stopped.value).rpartition("first bytes ")[2]
    assert messages[-1][25:].hex().startswith(shown)
    assert len(shown) == 2 * min(8 if messages[-1][25:26] == b"I" else 64, len(messages[-1]) - 25)


COMPLETE: dict[str, tuple[list[bytes], bytes]] = {
    "begin": ([], pg.begin(5, 100)),
    "commit": ([pg.begin(5, 100)], pg.commit(100)),
    "relation": ([], pg.relation(ONE, "v")),
    "insert": (IN_TRANSACTION, pg.insert(ONE, 1)),
    "truncate": ([pg.begin(5, 100)], pg.truncate((ONE, TWO))),
    "message": ([], pg.logical_message("headwater", 5)),
    "stream start": ([], pg.stream_start(5, first=True)),
    "streamed insert": (IN_SEGMENT, pg.insert(ONE, 1, 5)),
    "streamed truncate": (IN_SEGMENT, pg.truncate((ONE,), xid=5)),
    "streamed relation": (IN_SEGMENT, pg.relation(TWO, "v", 5)),
    "streamed message": (IN_SEGMENT, pg.logical_message("headwater", 5, xid=5)),
    "stream commit": ([*IN_SEGMENT, pg.stream_stop()], pg.stream_commit(5, 100)),
    "stream abort": ([*IN_SEGMENT, pg.stream_stop()], pg.stream_abort(5, 5)),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_message_cut_short_anywhere_stops(name: str) -> None:
    before, message = COMPLETE[name]
    values = 5 + 8 if "insert" in name else 0  # the decoder's business: a row may be short here
    for size in range(25, len(message) - values):
        with pytest.raises(ProtocolError):
            fed([*before, message[:size]])
    fed([*before, message])


def _mutated(messages: list[bytes], order: random.Random) -> list[bytes]:
    changed = list(messages)
    for _ in range(order.randint(1, 4)):
        at = order.randrange(len(changed))
        message = bytearray(changed[at])
        what = order.randrange(5)
        if what == 0 and message:
            message[order.randrange(len(message))] = order.randrange(256)
        elif what == 1:
            del message[order.randrange(len(message) + 1) :]
        elif what == 2:
            message += order.randbytes(order.randint(1, 20))
        elif what == 3:
            changed.insert(at, changed[order.randrange(len(changed))])
            continue
        else:
            message = bytearray(pg.framed(order.randbytes(order.randint(0, 40))))
        changed[at] = bytes(message)
    return changed


def _all_the_way(messages: list[bytes]) -> None:
    framer = fed(messages)
    if framer.in_transaction:
        return
    chunk = framer.cut()
    for block in chunk.blocks:
        if block.relation.relation_id == ONE and len(block.relation.columns) == 1:
            counted = np.ones(block.changes, dtype=np.bool_)
            net_effect(_schema_of(block.relation.columns[0].name), [(block, counted)], [], str)


def _schema_of(column: str) -> TableSchema:
    return TableSchema(
        ONE, "public", "r1", (Column(column, 1, 20, -1, SCHEMA.columns[0].value),), (column,), SCHEMA.leaves
    )


@settings(deadline=None, max_examples=400)
@given(seed=st.integers(0, 2**32))
def test_damaged_histories_are_refused_or_read_and_nothing_else_happens(seed: int) -> None:
    order = random.Random(seed)
    messages = _mutated(pg.Traffic(seed).run(order.randint(1, 25)).messages or [pg.origin()], order)
    _refused_or_read(lambda: _all_the_way(messages))


@settings(deadline=None, max_examples=200)
@given(bodies=st.lists(st.binary(max_size=60), max_size=6), in_segment=st.booleans())
def test_random_bytes_are_refused_or_read_and_nothing_else_happens(bodies: list[bytes], in_segment: bool) -> None:
    before = IN_SEGMENT if in_segment else IN_TRANSACTION
    _refused_or_read(lambda: _all_the_way([*before, *map(pg.framed, bodies)]))


@settings(deadline=None, max_examples=300)
@given(row=st.binary(max_size=40), operation=st.sampled_from(b"IUD"), kind=st.sampled_from(b"NKO\x00"))
def test_random_tuples_are_refused_or_read_and_nothing_else_happens(row: bytes, operation: int, kind: int) -> None:
    change = bytes([operation]) + ONE.to_bytes(4, "big") + bytes([kind]) + row
    _refused_or_read(lambda: _all_the_way([*IN_TRANSACTION, pg.framed(change), pg.commit(100)]))


@pytest.mark.parametrize("behind", [[], [pg.insert(ONE, 2)]])
def test_a_row_cut_short_is_named_by_its_change_and_none_of_its_values_is_shown(behind: list[bytes]) -> None:
    """Nor does it borrow bytes of the message behind it."""
    framer = fed([pg.relation(ONE, "v"), pg.begin(5, 100), pg.insert(ONE, 1), pg.insert(ONE, 0x5EC2E7)[:-1], *behind])
    framer.take([pg.commit(100)])
    blocks = [(block, np.ones(block.changes, dtype=np.bool_)) for block in framer.cut().blocks]
    with pytest.raises(HeadwaterError, match="change 1: ") as damaged:
        net_effect(SCHEMA, blocks, [], lambda number: f"change {number}")
    assert damaged.value.code == "protocol_error"
    assert "5ec2" not in str(damaged.value)


def _refused_or_read(work: Callable[[], object]) -> None:
    try:
        work()
    except (ProtocolError, BadValue):
        return
    except HeadwaterError as error:
        if error.code != "protocol_error":
            raise


def test_transactions_without_changes_are_told_apart() -> None:
    joined = Transactions.joined([])
    assert len(joined) == 0
    assert after(pg.begin(5, 10), pg.commit(10), pg.begin(6, 20), pg.commit(20)) == [(5, []), (6, [])]
