"""A wait whose lake does not answer goes on where that may pass: in a store, for who is let in, up to its deadline."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.waiting import wait as module

AWAY = OSError(5, "Generic S3 error", "s3://bucket/lake")
SHUT = PermissionError(13, "the store refuses access", "s3://bucket/lake")


class Waiter:
    progress = "as it was"

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def look(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def waited(monkeypatch: pytest.MonkeyPatch, root: str, remaining: float, *answers: Any) -> Any:
    pipeline: Any = SimpleNamespace(name="shop", lake_path=lambda: root)
    request: Any = SimpleNamespace(remaining=lambda: remaining)
    monkeypatch.setattr(module, "_OUTAGE_SECONDS", 0.01)
    monkeypatch.setattr(module, "borrowed", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(module, "Lookout", lambda *_: SimpleNamespace(refresh=lambda: None))
    monkeypatch.setattr(module, "Waiter", lambda *_: Waiter(list(answers)))
    return module.wait(pipeline, request)


def test_a_store_that_is_away_for_a_while_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, "s3://bucket/lake", 60, AWAY, None, AWAY, "the result") == "the result"


@pytest.mark.parametrize(
    ("root", "remaining", "error"),
    [("s3://bucket/lake", -1, AWAY), ("s3://bucket/lake", 60, SHUT), ("/lake", 60, AWAY)],
)
def test_what_waiting_cannot_cure_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, root: str, remaining: float, error: OSError
) -> None:
    with pytest.raises(type(error)):
        waited(monkeypatch, root, remaining, error, "the result")


@pytest.mark.usefixtures("airflow_home")
def test_the_first_look_of_a_sensor_does_the_same_and_no_longer_than_it_may_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headwater_airflow.sensors import freshness

    monkeypatch.setattr(freshness, "_LOOK_SECONDS", 0.01)

    def first(root: str, remaining: float, *answers: Any) -> Any:
        waiter: Any = Waiter(list(answers))
        return freshness._first_look(waiter, root, lambda: remaining)

    assert first("s3://bucket/lake", 60, AWAY, AWAY, "the result") == "the result"
    for root, remaining, error in (
        ("s3://bucket/lake", -1.0, AWAY),
        ("s3://bucket/lake", 60, SHUT),
        ("/lake", 60, AWAY),
    ):
        with pytest.raises(type(error)):
            first(root, remaining, error, "the result")
