"""Jobs that replace rows: two that ask at once, and the driver that one runs beside itself."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lakes import HandLake
from headwater.errors import LostLease, Refused, Transient
from headwater.lake.registry import Registry, now_text
from headwater.position import Position
from headwater.reload import replacing
from headwater.reload.replacing import Replacing, driver_beside

NAME = "public.a"
NOBODY: Any = None


def test_of_two_that_ask_at_once_for_the_same_rows_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever name is the lesser: the second asks while the first has looked and not written yet."""
    monkeypatch.setattr(replacing, "is_alive", lambda connection, session: True)
    monkeypatch.setattr(Replacing, "_overlap", lambda self, mine, other: mine.overlaps(other))
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    mine, other = (Registry.open(lake.root, "shop") for _ in range(2))
    assert mine is not None
    assert other is not None
    record, look = mine.record(NAME), Replacing._refuse_another
    second = Replacing(NOBODY, NOBODY, other, record, "the second")

    def look_and_be_late(self: Replacing, reload: Any) -> None:
        look(self, reload)
        if self.registry is mine and not other.reloads:
            second._ask("f" * 16, "headwater reload 2")

    monkeypatch.setattr(Replacing, "_refuse_another", look_and_be_late)
    with pytest.raises(LostLease, match="the second is being reloaded"):
        Replacing(NOBODY, NOBODY, mine, record, "the first")._ask("0" * 16, "headwater reload 1")
    mine.refresh()
    assert [reload.shown for reload in mine.reloads.values()] == ["the second"]


@pytest.fixture
def nobody_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replacing, "await_return", lambda connection, pipeline: False)
    monkeypatch.setattr(replacing, "is_running", lambda connection, pipeline: True)


def test_where_the_driver_of_another_job_ends_with_it_one_of_our_own_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_runs, ours = threading.Event(), threading.Event()
    other_runs.set()
    monkeypatch.setattr(replacing, "await_return", lambda connection, pipeline: True)
    monkeypatch.setattr(replacing, "is_running", lambda connection, pipeline: other_runs.is_set())
    monkeypatch.setattr(replacing, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(replacing, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(replacing, "_LOOK_SECONDS", 0.01)

    def replicate(pipeline: Any, until: None, seconds: None, stop: threading.Event) -> None:
        ours.set()
        stop.wait(30)

    monkeypatch.setattr(replacing, "replicate", replicate)
    pipeline: Any = SimpleNamespace(conninfo=lambda: "", name="shop")
    with driver_beside(NOBODY, pipeline, lambda _: None):
        assert not ours.wait(0.3), "as long as the other one runs"
        other_runs.clear()
        assert ours.wait(30)


def test_what_is_done_is_no_failure_though_none_could_run_here_while_the_other_driver_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = threading.Event()
    monkeypatch.setattr(replacing, "await_return", lambda connection, pipeline: True)
    monkeypatch.setattr(replacing, "is_running", lambda connection, pipeline: False)
    monkeypatch.setattr(replacing, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(replacing, "_SILENT_SECONDS", 0.1)
    monkeypatch.setattr(replacing, "_LOOK_SECONDS", 0.01)

    def replicate(*_: object) -> None:
        tried.set()
        raise Transient("the source does not answer")

    monkeypatch.setattr(replacing, "replicate", replicate)
    pipeline: Any = SimpleNamespace(conninfo=lambda: "", name="shop")
    with driver_beside(NOBODY, pipeline, lambda _: None):
        assert tried.wait(30)


@pytest.mark.parametrize("is_lent", [True, False])
def test_a_driver_that_takes_the_place_of_another_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lent: bool
) -> None:
    """A load that sets the source up keeps it out for minutes. `is_lent`: the other one ran already when the job came;
    else it was the faster of two that started together."""
    other_runs, ours = threading.Event(), threading.Event()
    other_runs.set()
    monkeypatch.setattr(replacing, "await_return", lambda connection, pipeline: is_lent)
    monkeypatch.setattr(replacing, "is_running", lambda connection, pipeline: other_runs.is_set())
    monkeypatch.setattr(replacing, "connect", lambda *_, **__: SimpleNamespace(close=lambda: None))
    for silence in ("_SILENT_SECONDS", "_AGAIN_SECONDS"):
        monkeypatch.setattr(replacing, silence, 0.1)
    monkeypatch.setattr(replacing, "_LOOK_SECONDS", 0.01)
    failures = [LostLease("a load's set-up is running") for _ in range(2)]
    if not is_lent:
        failures.insert(0, LostLease("another replicate is running", code="already_running"))

    def replicate(pipeline: Any, until: None, seconds: None, stop: threading.Event) -> None:
        if failures:
            raise failures.pop(0)
        ours.set()
        stop.wait(30)

    monkeypatch.setattr(replacing, "replicate", replicate)
    pipeline: Any = SimpleNamespace(conninfo=lambda: "", lake_path=lambda: str(tmp_path), name="shop")
    with driver_beside(NOBODY, pipeline, lambda _: None):
        other_runs.clear()
        assert ours.wait(30)
    assert not failures


@pytest.mark.usefixtures("nobody_drives")
def test_what_ended_the_driver_of_a_job_is_what_the_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died = threading.Event()

    def replicate(*_: object) -> None:
        died.set()
        raise Transient("no space is left", code="lake_full", where="lake.root", remedy="make room there")

    monkeypatch.setattr(replacing, "replicate", replicate)
    pipeline: Any = SimpleNamespace(lake_path=lambda: str(tmp_path), name="shop")

    def job() -> None:
        with driver_beside(NOBODY, pipeline, lambda _: None):
            died.wait(10)
            raise Transient("replicate has ended", code="reload_failed")

    with pytest.raises(Transient, match="no space is left"):
        job()


@pytest.mark.usefixtures("nobody_drives")
def test_a_job_that_needs_a_driver_does_not_wait_for_a_paused_pipeline(tmp_path: Path) -> None:
    lake = HandLake(tmp_path, Position("7", 1, 0x100), [NAME])
    known = lake.registry.pipeline
    assert known is not None
    lake.registry.write(replace(known, paused=now_text()))
    pipeline: Any = SimpleNamespace(lake_path=lambda: lake.root, name="shop")
    with pytest.raises(Refused, match="is paused since") as refused, driver_beside(NOBODY, pipeline, lambda _: None):
        pass
    assert refused.value.code == "paused"
