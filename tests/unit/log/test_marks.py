"""With `soft_delete` the net effect of any batch leaves every key that ever was, as it was last, marked if it is gone.

The model replays the log one change after the other; the logs are those of the net effect's own tests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fixtures.soak import examples
from headwater.log.blocks import Chunk
from headwater.log.net.net_effect import net_effect
from headwater.log.net.soft_delete import marked
from headwater.net_changes import NetChanges
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema
from unit.log.test_net_effect import Key, Log, Row, Shape, a_row, in_parts, logs

Stored = dict[Key, tuple[Row, int | None]]
"""By key the row and, if it is deleted, the LSN of the commit that did it."""


def schema_of(shape: Shape) -> TableSchema:
    return replace(shape.schema, soft_delete=True)


def replayed(log: Log, chunk: Chunk, end: int) -> Stored:
    """What the table holds after the first `end` changes."""
    table: Stored = {}
    before: dict[Key, Row] = {}
    for number, after in enumerate(log.history[:end]):
        lsn = int(chunk.transactions.end_lsn[chunk.transactions.index_of(np.array([number]))[0]])
        table |= {key: (row, lsn) for key, row in before.items() if key not in after}
        table |= {key: (row, None) for key, row in after.items()}
        before = after
    return table


def netted(shape: Shape, chunk: Chunk, start: int, end: int) -> NetChanges:
    schema = schema_of(shape)
    blocks = [(block, np.asarray((block.sequence >= start) & (block.sequence < end))) for block in chunk.blocks]
    truncates = [truncate for truncate in chunk.truncates if start <= truncate.sequence < end]
    marks = partial(marked, schema, transactions=chunk.transactions)
    return net_effect(schema, blocks, truncates, str, finish=marks)


def applied(shape: Shape, stored: Stored, changes: NetChanges) -> Stored:
    """`changes` on top of `stored`, with every promise checked."""
    keys = list(shape.key)
    assert not changes.removed.num_rows
    assert not changes.truncated
    result = {
        key: (row, changes.emptied[row["leaf"]][0] if row["leaf"] in changes.emptied and lsn is None else lsn)
        for key, (row, lsn) in stored.items()
    }
    origins = changes.origins.to_pylist() if changes.origins is not None else [None] * changes.rows.num_rows
    assert len(origins) == changes.rows.num_rows == len(changes.stored)
    for index, row in enumerate(changes.rows.to_pylist()):
        key = tuple(row[name] for name in keys)
        before = stored.get(key)
        lived = before is not None and before[1] is None
        if changes.stored[index]:
            assert lived, "a row to be put over a stored one must find one that lives"
        elif lived and before is not None:
            assert before[0]["leaf"] in changes.emptied, "a new row may only meet a deleted one"
        origin = origins[index]
        source = tuple(origin[k] for k in keys) if origin is not None and origin[keys[0]] is not None else key
        for name in (name for name, mask in changes.unchanged.items() if mask[index]):
            row[name] = stored[source][0]["leaf" if name == PARTITION_COLUMN else name]
        assert row[DELETED] == (row[DELETED_LSN] is not None) == (row[DELETED_AT] is not None)
        leaf = row.pop(PARTITION_COLUMN, shape.leaves[0])
        lsn = row[DELETED_LSN]
        result[key] = ({k: v for k, v in row.items() if not k.startswith("_hw_")} | {"leaf": leaf}, lsn)
    return result


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(logs(), st.data())
def test_wherever_batches_are_cut_the_table_holds_every_key_as_it_was_last(log: Log, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log.history)), max_size=3)))
    chunk = log.cut()
    table: Stored = {}
    for start, end in zip([0, *cuts], [*cuts, len(log.history)], strict=True):
        table = applied(log.shape, table, netted(log.shape, chunk, start, end))
        assert table == replayed(log, chunk, end)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(logs(), st.data())
def test_in_parts_on_disk_it_is_the_same(log: Log, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(log.history)))
    whole = log.cut()
    with in_parts(whole) as (chunk, _):
        found = applied(log.shape, replayed(log, whole, start), netted(log.shape, chunk, start, len(log.history)))
        assert found == replayed(log, whole, len(log.history))


@pytest.mark.parametrize("shape", [Shape(("id",)), Shape(("id",), full=True)])
def test_a_row_that_was_changed_and_deleted_in_one_batch_is_kept_as_it_was_last(shape: Shape) -> None:
    log = Log(shape, model={(1,): a_row()})
    log.begin()
    log.update((1,), a_row(note="last"), ("big", "wide"))
    log.delete((1,))
    log.insert(a_row(id=2))
    log.delete((2,))
    log.commit()
    chunk = log.cut()
    changes = netted(shape, chunk, 0, 4)
    lsn = int(chunk.transactions.end_lsn[0])
    expected: dict[Any, Any] = {(1,): (a_row(note="last"), lsn), (2,): (a_row(id=2), lsn)}
    assert applied(shape, {(1,): (a_row(), None)}, changes) == expected
