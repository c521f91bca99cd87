"""What an overview says of the source, and what the metrics take from it."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.lakes import HandLake, position_at
from fixtures.pages import page_pipeline
from fixtures.waiting import until
from headwater.monitor import overview
from headwater.monitor.metrics import LAG_SECONDS, STAGE_BUSY, TABLE_LAG_BYTES, TABLE_LAG_SECONDS, samples
from headwater.monitor.overview import PipelineWatch, _oldest
from headwater.monitor.source_watch import SourceAnswer, SourceWatch
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.source.slot import SlotState
from headwater.source.snapshots import OpenTransaction
from headwater.waiting.source_state import SourceState


def oldest(*ages: float | None) -> object:
    """Of transactions with rising ids; the age of the one that is shown."""
    found = tuple(OpenTransaction(10 + n, 1000 + n, "u", "d", age, None) for n, age in enumerate(ages))
    state = SourceState(position_at(), (datetime.now(UTC), 0x100), 0.0, None, open_transactions=found)
    shown = _oldest(SourceAnswer(state))
    return shown and (shown["seconds"], shown["what"].split(" (")[0])


def test_a_younger_transaction_whose_age_is_known_does_not_hide_the_oldest_one() -> None:
    assert oldest() is None
    assert oldest(3.0, 900.0) == (900.0, "process 1001"), "it has written late"
    assert oldest(None) == (None, "process 1000")
    assert oldest(None, 7200.0) == (7200.0, "process 1000"), "for two hours at least: an alert on that still fires"
    assert oldest(3.0, None) == (3.0, "process 1000")


def test_an_answer_that_comes_while_the_rest_of_a_look_is_made_is_in_what_a_scrape_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_pipeline(tmp_path, "shop", "public.a")
    HandLake(tmp_path / "shop_lake", position_at(), ["public.a"])
    watch = PipelineWatch(load_pipeline(str(tmp_path / "shop.yaml")), patience=0)
    asked = threading.Event()

    def ask(source: SourceWatch, tables: object, look: object, before: object, began: float) -> SourceAnswer:
        asked.wait()
        state = SourceState(position_at(), (datetime.now(UTC), 0x100), 0.0, None)
        return SourceAnswer(state, outage="", asked_at=began)

    def loads(*arguments: object) -> list[dict[str, Any]]:
        asked.set()
        until(lambda: watch._source._asking is None, "the visit has ended")
        return []

    monkeypatch.setattr(SourceWatch, "_ask", ask)
    monkeypatch.setattr(overview, "shown_loads", loads)
    assert watch.overview()["source"]["answers"] is False, "a page does not wait"
    watch.await_source(60)
    assert watch.overview()["source"]["answers"] is True


def test_a_stage_is_busy_only_while_a_driver_runs(tmp_path: Path) -> None:
    page_pipeline(tmp_path, "shop", "public.a")
    HandLake(tmp_path / "shop_lake", position_at(), ["public.a"]).publish(0x2000, "public.a")
    found = PipelineWatch(load_pipeline(str(tmp_path / "shop.yaml"))).overview()
    found["stages"] = {"apply": {"rate": 1.0, "busy": 0.9, "latency_seconds": 0.1}}
    for running, expected in ((True, [0.9]), (False, []), (None, [])):
        busy = [value for metric, _, value in samples({**found, "running": running}, []) if metric is STAGE_BUSY]
        assert busy == expected


def answering(monkeypatch: pytest.MonkeyPatch, lsn: int) -> datetime:
    """From now on the source stands at `lsn`, and a driver reads it; its clock."""
    now = datetime.now(UTC)
    slot = SlotState("s", "pgoutput", "d", True, 1, 0, 0, 0, "reserved", None, False, False)
    state = SourceState(position_at(lsn=lsn), (now, lsn), time.monotonic(), slot)
    answer = SourceAnswer(state, outage="", asked_at=time.monotonic())
    monkeypatch.setattr(SourceWatch, "_ask", lambda *arguments: answer)
    return now


def test_a_lake_without_a_sample_below_what_it_holds_has_a_lag_once_that_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a load of hours: all that the driver has sampled lies above what it has applied."""
    page_pipeline(tmp_path, "shop", "public.a", defaults={"freshness": "120s"})
    lake = HandLake(tmp_path / "shop_lake", position_at(), ["public.a"])

    def shown(ago: float) -> tuple[list[float], str, bool | None]:
        now = answering(monkeypatch, 0x20000)
        lake.publish(lake.position.lsn + 1, "public.a", sample=(now - timedelta(seconds=ago), 0x9000))
        watch = PipelineWatch(load_pipeline(str(tmp_path / "shop.yaml")), patience=30)
        found, rows = watch.overview(), watch.table_rows()
        lags = [value // 60 for metric, _, value in samples(found, rows) if metric in (LAG_SECONDS, TABLE_LAG_SECONDS)]
        return lags, found["health"]["sentence"], rows[0]["late"]

    assert shown(3 * 3600 + 5) == ([180, 180], "Late: public.a is 3 h behind the source, 2 min are allowed.", True)
    unknown = "Late: how far public.a is behind is not known yet."
    assert shown(90) == ([1], unknown, None), "the file allows the table more"
    assert shown(30) == ([], unknown, None)


def test_a_table_that_left_the_pipeline_file_has_no_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page_pipeline(tmp_path, "shop", "public.a")
    lake = HandLake(tmp_path / "shop_lake", position_at(), ["public.a", "public.b"])
    now = answering(monkeypatch, 0x3000)
    lake.publish(0x2000, "public.a", "public.b", sample=(now - timedelta(minutes=10), 0x2000))
    lake.enter("public.b", "removed", "it is not in the pipeline file any more")
    watch = PipelineWatch(load_pipeline(str(tmp_path / "shop.yaml")), patience=30)
    found = samples(watch.overview(), watch.table_rows())
    assert [labels[1] for metric, labels, _ in found if metric in (TABLE_LAG_SECONDS, TABLE_LAG_BYTES)] == [
        "public.a"
    ] * 2


def test_a_file_that_moved_while_nobody_looked_does_not_tell_that_a_driver_lives_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_pipeline(tmp_path, "shop", "public.a")
    lake = HandLake(tmp_path / "shop_lake", position_at(), ["public.a"])
    watch = PipelineWatch(load_pipeline(str(tmp_path / "shop.yaml")))
    clock = 1000.0
    monkeypatch.setattr("headwater.monitor.overview.time.monotonic", lambda: clock)

    def after(seconds: float, lsn: int | None = None) -> bool | None:
        nonlocal clock
        clock += seconds
        if lsn is not None:
            lake.publish(lsn, "public.a")
        running = watch.overview()["running"]
        assert running is None or isinstance(running, bool)
        return running

    assert after(0, 0x2000) is None
    assert after(5, 0x2100) is True, "a page looks every five seconds"
    assert after(60, 0x2200) is True, "and a scraper once a minute"
    assert after(3600, 0x2300) is None, "the driver may have been killed long ago"
    assert after(2) is None
    assert after(2) is False
    assert after(2, 0x2400) is True
    assert after(3600) is False, "nothing has moved since"
