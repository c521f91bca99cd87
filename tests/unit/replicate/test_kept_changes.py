"""What a driver keeps for a load or a reload is read back as it was, once, whoever kept it and however often."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headwater.delta import storage
from headwater.lake.paths import kept_path
from headwater.log import kept as kept_bytes
from headwater.log.blocks import Block, Held, Relation, RelationColumn, Transactions, Truncate
from headwater.replicate.tables.keeper import KeptChanges, Seen

ORDERS = Relation(7, "public", "orders", "d", (RelationColumn("id", 23, -1, True), RelationColumn("n", 23, -1, False)))
LINES = Relation(8, "public", "lines", "f", ())


def block(relation: Relation, *numbers: int, width: int = 5) -> Block:
    """A block whose change with the number n is `width` bytes n."""
    data = np.concatenate([np.full(width, number % 256, dtype=np.uint8) for number in numbers])
    starts = np.arange(len(numbers), dtype=np.int64) * width
    return Block(relation, Held(data, starts, starts + width, np.array(numbers, dtype=np.int64)))


def transactions(*each: tuple[int, int, int]) -> Transactions:
    """(transaction id, end, number of its first change)."""
    xids, ends, firsts = (np.array(column, dtype=np.int64) for column in zip(*each, strict=True))
    return Transactions(xids, ends, ends * 10, firsts)


def everything(*blocks: Block) -> list[tuple[Block, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    return [(one, np.ones(one.changes, dtype=np.bool_)) for one in blocks]


def found(changes: KeptChanges, up_to: int | None = None) -> list[tuple[int, int, bytes]]:
    """(transaction id, relation id, bytes) of every change that counts, in order."""
    rows = []
    for kept in changes.shares(up_to):
        known = kept.share.transactions
        for one in kept.share.blocks:
            held = one.load()
            of = known.index_of(held.sequence)
            for index in range(held.changes):
                if kept.counts[of[index]]:
                    content = held.data[held.starts[index] : held.ends[index]].tobytes()
                    rows.append(
                        (int(held.sequence[index]), int(known.xid[of[index]]), one.relation.relation_id, content)
                    )
    return [row[1:] for row in sorted(rows)]


def begun(root: Path, generation: int) -> KeptChanges:
    changes = KeptChanges(str(root), "a", generation)
    changes.begin()
    return changes


def test_shares_come_back_as_they_were_in_the_logs_order(tmp_path: Path) -> None:
    changes = begun(tmp_path, 1)
    first = transactions((11, 100, 0), (12, 200, 3), (13, 300, 5))
    changes.append(everything(block(ORDERS, 0, 4), block(LINES, 3)), [], first, 300)
    changes.append([], [Truncate(9, (7, 8), cascade=True)], transactions((14, 400, 8)), 450)
    assert found(changes) == [(11, 7, b"\0" * 5), (12, 8, b"\3" * 5), (12, 7, b"\4" * 5)]
    one, two = changes.shares()
    assert one.share.blocks[0].relation == ORDERS
    assert one.share.transactions.end_lsn.tolist() == [100, 200]
    assert one.share.transactions.commit_time.tolist() == [1000, 2000]
    assert (one.share.to_lsn, two.share.to_lsn) == (300, 450)
    (truncate,) = two.share.truncates
    assert (truncate.relation_ids, truncate.cascade) == ((7, 8), True)
    assert truncate.sequence > int(one.share.blocks[0].sequence[-1])
    assert two.share.transactions.index_of(np.array([truncate.sequence])).tolist() == [0]


def test_a_large_share_lies_in_pieces_and_without_the_last_one_it_is_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_bytes, "PIECE_BYTES", 200)
    changes = begun(tmp_path, 1)
    blocks = [block(ORDERS, *range(start, start + 3), width=50) for start in range(0, 12, 3)]
    changes.append(everything(*blocks), [], transactions((11, 100, 0)), 100)
    names = sorted(storage.names(kept_path(str(tmp_path), "a")))
    assert len(names) == 4
    assert [content[0] for _, _, content in found(changes)] == list(range(12))
    storage.delete(f"{kept_path(str(tmp_path), 'a')}/{names[-1]}")
    assert list(changes.shares()) == []


def test_what_two_drivers_have_kept_counts_once(tmp_path: Path) -> None:
    """The first one died behind the ledger; the second one began with another connection, at other batches."""
    before = begun(tmp_path, 1)
    before.append(everything(block(ORDERS, 0)), [], transactions((11, 100, 0)), 150)
    before.append(everything(block(ORDERS, 1, 2)), [], transactions((12, 200, 1), (13, 300, 2)), 300)
    after = begun(tmp_path, 2)
    after.append(everything(block(ORDERS, 1, 2, 3)), [], transactions((12, 200, 1), (13, 300, 2), (14, 400, 3)), 400)
    assert [xid for xid, _, _ in found(after)] == [11, 12, 13, 14]


def test_of_what_an_earlier_driver_kept_nothing_counts_that_the_log_has_yet_to_deliver_again(tmp_path: Path) -> None:
    """The ledger of the first one stood between two transactions of its last share."""
    before = begun(tmp_path, 1)
    before.append(everything(block(ORDERS, 0)), [], transactions((11, 100, 0)), 150)
    before.append(everything(block(ORDERS, 1, 2)), [], transactions((12, 200, 1), (13, 300, 2)), 300)
    after = begun(tmp_path, 2)
    assert [xid for xid, _, _ in found(after, up_to=200)] == [11, 12]
    after.append(everything(block(ORDERS, 2, 3)), [], transactions((13, 300, 2), (14, 400, 3)), 400)
    for up_to in (200, 300, 400):
        assert [xid for xid, _, _ in found(after, up_to)] == [11, 12, 13, 14]


def test_a_driver_that_begins_again_goes_on_behind_what_it_kept(tmp_path: Path) -> None:
    begun(tmp_path, 1).append(everything(block(ORDERS, 0)), [], transactions((11, 100, 0)), 100)
    again = begun(tmp_path, 1)
    again.append(everything(block(ORDERS, 1)), [], transactions((12, 200, 1)), 200)
    assert [xid for xid, _, _ in found(again)] == [11, 12]
    for kept in again.shares():
        again.remove(kept)
    assert storage.names(kept_path(str(tmp_path), "a")) == []


def test_a_share_without_a_change_of_the_table_is_not_kept(tmp_path: Path) -> None:
    changes = begun(tmp_path, 1)
    one = block(ORDERS, 0)
    changes.append([(one, np.zeros(1, dtype=np.bool_))], [], transactions((11, 100, 0)), 100)
    assert list(changes.shares()) == []


@pytest.mark.parametrize("whole_bytes", [0, 8, 4096, -4096, -1])
def test_a_piece_with_zeros_for_an_end_was_never_kept(tmp_path: Path, whole_bytes: int) -> None:
    """The power went before it was on disk, so the log brought it again, and the next driver kept it anew."""
    begun(tmp_path, 1).append(everything(block(ORDERS, *range(1, 2000))), [], transactions((11, 100, 0)), 100)
    (piece,) = Path(kept_path(str(tmp_path), "a")).iterdir()
    content = piece.read_bytes()
    begin = content[:whole_bytes]
    piece.write_bytes(begin + bytes(len(content) - len(begin)))
    again = begun(tmp_path, 2)
    again.append(everything(block(ORDERS, *range(1, 2000))), [], transactions((11, 100, 0)), 100)
    assert len(found(again)) == 1999


def test_a_block_of_zeros_within_a_piece_is_found(tmp_path: Path) -> None:
    changes = begun(tmp_path, 1)
    changes.append(everything(block(ORDERS, *range(1, 2000))), [], transactions((11, 100, 0)), 100)
    (piece,) = Path(kept_path(str(tmp_path), "a")).iterdir()
    content = piece.read_bytes()
    piece.write_bytes(content[:4096] + bytes(4096) + content[8192:])
    assert list(changes.shares()) == []


def test_a_piece_of_an_older_headwater_has_no_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = begun(tmp_path, 1)
    dumps = json.dumps
    monkeypatch.setattr(json, "dumps", lambda header: dumps({k: v for k, v in header.items() if k != "checksum"}))
    changes.append(everything(block(ORDERS, 0, 4)), [], transactions((11, 100, 0)), 100)
    (piece,) = Path(kept_path(str(tmp_path), "a")).iterdir()
    assert b"checksum" not in piece.read_bytes()
    assert [xid for xid, _, _ in found(changes)] == [11, 11]


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    changes = begun(tmp_path, 1)
    changes.append(everything(block(ORDERS, 0)), [], transactions((11, 100, 0)), 100)
    (name,) = storage.names(kept_path(str(tmp_path), "a"))
    storage.replace(f"{kept_path(str(tmp_path), 'a')}/{name}", b"something else entirely")
    with pytest.raises(ValueError, match="no file of kept changes"):
        list(changes.shares())


def counting(changes: KeptChanges, up_to: int, seen: Seen, applied: int | None = None) -> list[int]:
    """The transactions that count of what was not read before."""
    return [
        int(xid)
        for kept in changes.shares(up_to, seen, applied)
        for xid, counts in zip(kept.share.transactions.xid, kept.counts, strict=True)
        if counts
    ]


def test_what_is_read_by_and_by_comes_once(tmp_path: Path) -> None:
    changes, seen = begun(tmp_path, 2), Seen()
    changes.append(everything(block(ORDERS, 0, 4)), [], transactions((11, 100, 0), (12, 200, 3)), 200)
    assert counting(changes, 200, seen, applied=100) == [], "the table does not hold the share yet"
    assert counting(changes, 200, seen, applied=200) == [11, 12]
    changes.append(everything(block(ORDERS, 5)), [], transactions((13, 300, 5)), 300)
    assert counting(changes, 200, seen) == [13]
    assert counting(changes, 300, seen) == []


def test_what_an_earlier_driver_may_yet_bring_into_the_table_is_not_passed_by(tmp_path: Path) -> None:
    earlier = begun(tmp_path, 1)
    earlier.append(everything(block(ORDERS, 0)), [], transactions((11, 100, 0)), 100)
    earlier.append(everything(block(ORDERS, 5, 7)), [], transactions((12, 200, 5), (13, 250, 7)), 250)
    mine, seen = begun(tmp_path, 2), Seen()
    assert counting(mine, 100, seen) == [11]
    assert counting(mine, 250, seen) == [12, 13], "it woke up and committed what it had kept"
    mine.append(everything(block(ORDERS, 9)), [], transactions((13, 250, 0), (14, 300, 9)), 300)
    assert counting(mine, 300, seen) == [14]
