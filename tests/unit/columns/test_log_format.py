"""One column of one table decides in which form the log sends the values of all."""

from __future__ import annotations

import logging

import pytest

from headwater.columns.log_format import may_be_binary, refuse_late_text
from headwater.errors import Transient
from headwater.lake.registry import State, TableRecord
from headwater.schema import SERVER_TEXT, Column, Leaf, TableSchema, ValueType


def record(name: str, wire: str, state: State = "active") -> TableRecord:
    column = Column("C", 1, 1, -1, ValueType(wire, "string"))
    schema = TableSchema(1, "public", name, (column,), (), (Leaf(1, "public", name, 1),))
    return TableRecord(f"public.{name}", f"public/{name}", state, schemas=((0, schema),))


ORDINARY, ODD, GONE = record("a", "text"), record("b", SERVER_TEXT, "suspended"), record("c", SERVER_TEXT, "removed")
NEW = TableRecord("public.d", "public/d", "new")


def test_the_log_is_binary_unless_a_loaded_table_needs_text(caplog: pytest.LogCaptureFixture) -> None:
    assert may_be_binary({one.name: one for one in (ORDINARY, GONE, NEW)})
    assert not caplog.records
    assert not may_be_binary({one.name: one for one in (ORDINARY, ODD, GONE, NEW)})
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert told.getMessage().endswith('is not known: public.b."C"')


def test_a_table_that_joined_between_decision_and_slot_means_try_again() -> None:
    refuse_late_text({ORDINARY.name: ORDINARY}, binary=True)
    refuse_late_text({ODD.name: ODD}, binary=False)
    with pytest.raises(Transient, match=r"send text because of public\.b\.\"C\""):
        refuse_late_text({ODD.name: ODD}, binary=True)
