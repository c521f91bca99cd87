"""What a driver's log says while all is well: that it began, from where, and once a minute what it did."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from fixtures.lakes import position_at
from headwater.replicate.minutes import Minutes


def run(epochs: int, changes: int, processed: int = 0x200) -> Any:
    records = {name: SimpleNamespace(is_followed=name != "c") for name in "abc"}
    return SimpleNamespace(
        ledger=SimpleNamespace(newest=SimpleNamespace(position=position_at(lsn=0x100))),
        tables=SimpleNamespace(records=records),
        totals=SimpleNamespace(epochs=epochs, changes=changes),
        publisher=SimpleNamespace(latencies={"write": 0.5, "publish": 0.25}),
        processed=processed,
    )


def test_it_tells_where_it_begins_and_each_minute_what_came(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    caplog.set_level("INFO")
    said = Minutes("shop")
    for seconds, done in ((0.0, run(0, 0)), (30.0, run(9, 90)), (29.9, run(20, 1000)), (0.1, run(45, 1234, 0x300))):
        now[0] += seconds
        said.say(done)
    now[0] += 61
    said.say(run(46, 1234, 0x400))  # a row of an idle log
    assert [record.getMessage() for record in caplog.records] == [
        "pipeline shop: replicating 2 tables from 0/100 on",
        "pipeline shop: 1,234 changes in 45 epochs in the last 1 min, the newest 0.8 s behind its commit; "
        "the lake holds everything up to 0/300",
        "pipeline shop: no change in the last 1 min; the lake holds everything up to 0/400",
    ]
