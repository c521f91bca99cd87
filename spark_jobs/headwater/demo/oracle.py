"""What the source's own answer was at a position: the demo's proof, independent of Headwater's reading.

A second replication slot with another plugin (`test_decoding`) is read by plain SQL. It says where in the log each
transaction committed; the writer says what the answer was after each. The true answer at a position is that of the
newest transaction whose commit ends at or before it.
"""

from __future__ import annotations

from headwater.demo.shop import Connection, Revenue, revenue
from headwater.position import parse_lsn

_SLOT = "demo_oracle"
_XID_BITS = 0xFFFFFFFF


class Oracle:
    """To be made before the writer starts, by a role that may create slots."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        connection.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", (_SLOT,))
        self._before = revenue(connection)

    def commits(self) -> list[tuple[int, int]]:
        """(end of the commit in the log, transaction id) of every transaction so far, in commit order."""
        rows = self._connection.execute(
            "select lsn::text, xid::text::bigint from pg_logical_slot_peek_changes"
            "(%s, null, null, 'skip-empty-xacts', '1') where data like 'COMMIT%%'",
            (_SLOT,),
        ).fetchall()
        return [(parse_lsn(lsn), int(xid)) for lsn, xid in rows]

    def answer_at(self, position: int, answers: dict[int, Revenue]) -> tuple[Revenue, int]:
        """The source's answer at `position`, and how many of its transactions that includes."""
        by_xid = {xid & _XID_BITS: answer for xid, answer in dict(answers).items()}  # a copy: the writer goes on
        covered = [xid for lsn, xid in self.commits() if lsn <= position and xid in by_xid]
        return (by_xid[covered[-1]] if covered else self._before), len(covered)
