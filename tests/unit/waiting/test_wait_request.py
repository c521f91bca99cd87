"""What a wait is asked for: the same for the command, for a sensor and for what Airflow has stored of one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headwater.errors import Refused
from headwater.lake.requirements import Now, Target, WantedParts
from headwater.names import TableName
from headwater.waiting.request import WaitRequest, asked

A, B = TableName("public", "a"), TableName("public", 'b "and" c')


def request(**options: Any) -> WaitRequest:
    return asked("now", 60, [A, B], {str(A): "a_1"}, keep=5, owner="me", who="dag.fresh", **options)


def test_names_and_requirements_are_taken_as_a_person_writes_them() -> None:
    found = request()
    assert (found.wanted, found.called) == (Now(), "now")
    assert (found.tables, found.partitions) == ((A, B), {A: [TableName("public", "a_1")]})
    assert timedelta(seconds=59) < found.deadline - datetime.now(UTC) <= timedelta(seconds=60)
    with pytest.raises(Refused, match="no freshness requirement"):
        asked("soon", 60, keep=5, owner="me")
    with pytest.raises(Refused, match="not among the tables"):
        asked("now", 60, [B], {str(A): "a_1"}, keep=5, owner="me")


def test_one_table_as_a_text_is_refused_and_not_taken_for_its_letters() -> None:
    with pytest.raises(Refused, match=r"tables='public\.a': expected a list of names"):
        asked("now", 60, "public.a", keep=5, owner="me")


def test_a_wait_without_an_end_has_the_last_moment_there_is_as_its_deadline() -> None:
    assert asked("now", 1e15, keep=5, owner="me").remaining() > 1e11


def test_a_request_whose_target_is_pinned_survives_the_way_through_a_database() -> None:
    target = Target(0x300, 1, "7", validated=(str(A),))
    pinned = replace(request(), validated=True, ignore_suspended=True, began=datetime.now(UTC)).pinned(
        target, [str(A), str(B)]
    )
    assert WaitRequest.from_json(pinned.to_json()) == pinned
    assert not pinned.validated, "the target says of which tables"
    again = request().resumed(pinned.to_json())
    assert (again.wanted, again.deadline, again.began) == (target, pinned.deadline, pinned.began)


def test_a_target_that_knows_its_partitions_is_not_given_them_anew() -> None:
    target = Target(0x300, 1, "7", parts={str(A): WantedParts(("public.a_1",), {"public.a_1": 11})})
    assert request().pinned(target, [str(A)]).partitions == {}
    assert request().pinned(Target(0x300, 1, "7"), [str(A)]).partitions == request().partitions
