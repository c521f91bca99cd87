"""What limits a pipeline, and when it will have caught up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from headwater.lake.freshness import LOG_RATE, SOURCE_RATE
from headwater.lake.ledger import TableVersion
from headwater.log.blocks import Chunk, Transactions
from headwater.replicate.batches.batch import Arrivals, Batch
from headwater.replicate.batches.lanes import Done, Result
from headwater.replicate.batches.open_epochs import OpenEpochs
from headwater.replicate.batches.pace import COMMITS_PER_SECOND, Pace
from headwater.replicate.batches.stage_times import ApplyRate, BusyShares, RowTimes, latency
from headwater.stage_clock import measured, stage
from headwater.waiting.speed import speed

BEHIND = 60.0


def test_the_busiest_stage_is_the_bottleneck_if_it_is_busy_at_all() -> None:
    shown = speed({"decode_busy": 0.7, "write_busy": 0.9, "write_bytes_per_second": 5.0}, 0, 0.0, running=True)
    assert shown["bottleneck"] == "write"
    assert shown["stages"]["write"] == {"rate": 5.0, "busy": 0.9, "latency_seconds": None}
    assert speed({"decode_busy": 0.2}, 0, 0.0, running=True)["bottleneck"] is None
    assert speed({}, None, None, running=False)["bottleneck"] is None


def test_the_time_to_catch_up_counts_what_the_source_writes_meanwhile() -> None:
    rates = {LOG_RATE: 300.0, SOURCE_RATE: 100.0}
    shown = speed(rates, 1000, BEHIND, running=True)
    assert (shown["catching_up"], shown["eta_seconds"]) == (True, 5.0)


@pytest.mark.parametrize(
    ("rates", "lag_seconds", "running"),
    [
        ({LOG_RATE: 300.0, SOURCE_RATE: 300.0}, BEHIND, True),
        ({LOG_RATE: 300.0}, 1.0, True),
        ({LOG_RATE: 300.0}, BEHIND, False),
        ({}, BEHIND, True),
        ({LOG_RATE: 300.0}, None, True),
    ],
)
def test_there_is_no_time_to_catch_up_where_none_is_known(
    rates: dict[str, float], lag_seconds: float | None, running: bool
) -> None:
    assert speed(rates, 1000, lag_seconds, running=running)["eta_seconds"] is None


def test_stages_nest_and_add_up() -> None:
    with measured() as spent:
        with stage("net"):
            time.sleep(0.02)
            with stage("decode"):
                time.sleep(0.05)
            time.sleep(0.02)
        time.sleep(0.05)
    assert spent["decode"] >= 0.05
    assert 0.04 <= spent["net"] < spent["net"] + spent["decode"]
    assert set(spent) == {"net", "decode"}


def test_outside_of_a_measurement_a_stage_is_nothing() -> None:
    with stage("net"):
        pass
    with measured() as spent:
        pass
    assert spent == {}


def test_the_parts_of_an_epochs_latency_add_up_to_the_time_from_commit_to_row() -> None:
    one = np.array([5], dtype=np.int64)
    offset = 1_700_000_000.0
    commit_time = np.array([int((offset + 100.0 - 946_684_800.0) * 1e6)], dtype=np.int64)
    chunk = Chunk(Transactions(one, one, commit_time, one), (), (), 5, 6, received=100.2, shipped=100.3)
    epochs = OpenEpochs()
    epochs.begin(Batch([chunk]), ["t"], 101.0)
    stages = {"decode": 0.1, "net": 0.1, "plan": 0.1, "write": 0.2, "commit": 0.1}
    epochs.resolve(Done("t", (1,), Result({"t": TableVersion(1, 5, "active")}), 101.2, 102.0, stages))
    epoch = epochs.publishable()
    assert epoch is not None
    times = latency(epoch, 102.5, offset)
    assert sum(times.values()) == pytest.approx(2.5)
    assert times["send"] == pytest.approx(0.2)
    assert times["queue"] == pytest.approx(0.7)
    assert times["wait"] == pytest.approx(0.2)
    assert times["other"] == pytest.approx(0.2)
    assert times["publish"] == pytest.approx(0.5)


def test_before_a_row_the_lake_was_behind_by_the_age_of_the_oldest_commit_in_it() -> None:
    offset, ages = 1_700_000_000.0, (300.0, 2.0, 1.0)  # the first was committed while no driver ran
    now = time.monotonic()
    ids = np.arange(1, 4)
    committed = np.array([int((offset + now - age - 946_684_800.0) * 1e6) for age in ages], dtype=np.int64)
    chunk = Chunk(Transactions(ids, ids, committed, ids), (), (), 5, 6, received=now, shipped=now)
    epochs = OpenEpochs()
    epochs.begin(Batch([chunk]), ["t"], now)
    epochs.resolve(Done("t", (1,), Result({"t": TableVersion(1, 5, "active")}), now, now, {}))
    epoch = epochs.publishable()
    assert epoch is not None
    times = RowTimes(epoch, offset, epoch.arrivals.oldest)
    waited = time.monotonic() - now
    assert times.lag is not None
    assert 300.0 - 1e-3 <= times.lag <= 300.0 + waited + 1e-3
    assert 101.0 - 1e-3 <= sum(times.stages.values()) <= 101.0 + waited + 1e-3, "the latency is that of the mean commit"
    of_before = RowTimes(None, offset, epoch.arrivals.oldest).lag  # its row had to wait, and it comes with this one
    assert of_before is not None
    assert of_before >= times.lag
    assert RowTimes(None, offset, None).lag is None


def test_a_row_that_only_says_a_state_has_no_latency_however_long_ago_its_transactions_were() -> None:
    """As the first row behind a load: its transactions are older than what was loaded."""
    now, offset = time.monotonic(), 1_700_000_000.0
    one = np.array([5], dtype=np.int64)
    committed = np.array([int((offset + now - 17.0 - 946_684_800.0) * 1e6)], dtype=np.int64)
    epochs = OpenEpochs()
    epochs.begin(
        Batch([Chunk(Transactions(one, one, committed, one), (), (), 5, 6, received=now, shipped=now)]), [], now
    )
    epoch = epochs.publishable()
    assert epoch is not None
    times = RowTimes(epoch, offset, None)
    times.written(time.monotonic())
    assert (times.stages, times.lag) == ({}, None)


def test_means_of_arrivals_count_every_transaction_once() -> None:
    few, many = Arrivals(1, 10.0, 20.0, 30.0, 10.0), Arrivals(3, 14.0, 24.0, 34.0, 9.0)
    assert few + many == Arrivals(4, 13.0, 23.0, 33.0, 9.0)
    assert Arrivals(0, None, 1.0, 1.0, None) + few == few
    assert few + Arrivals(0, None, 1.0, 1.0, None) == few


def test_busy_shares_are_of_the_time_that_the_stages_threads_had() -> None:
    busy = BusyShares()
    busy.add({"frame": 1000.0, "decode": 0.0}, 5000)
    rates = busy.rates(4)
    assert rates["frame_busy"] == 1.0
    assert rates["frame_bytes_per_second"] == 5.0
    assert rates["decode_busy"] == 0.0


@pytest.mark.parametrize(
    ("side_by_side", "tables", "at_once", "share"),
    [
        pytest.param(12, 1, 1, 1.0, id="a store, all of one table's time"),
        pytest.param(12, 12, 2, 2 / 12, id="a store, two of twelve threads"),
        pytest.param(1, 1, 1, 1.0, id="a disk, one table"),
        pytest.param(1, 12, 1, 1.0, id="a disk, one after the other"),
        pytest.param(1, 12, 0.5, 0.5, id="a disk, half of the time"),
        pytest.param(1, 12, 4, 1.0, id="a disk, four long ones side by side"),
    ],
)
def test_lanes_are_busy_for_the_share_of_the_threads_that_could_have_worked(
    side_by_side: int, tables: int, at_once: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten seconds over so many tables: they write for a quarter of their time."""
    now = 0.0
    monkeypatch.setattr("headwater.replicate.batches.stage_times.time.monotonic", lambda: now)
    busy = BusyShares()
    for number in range(tables):
        now = 10.0 * (number + 1) / tables
        took = 10.0 * at_once / tables
        busy.add({"write": took / 4}, lane=f"public.t{number}", took=took)
    busy.add({}, lane="public.t0", took=100.0)  # an errand that has taken long
    assert busy.rates(side_by_side)["write_busy"] == pytest.approx(share / 4, abs=0.001)


def test_the_rate_of_applying_is_taken_while_something_is_applied() -> None:
    speed_of = ApplyRate(0.0)
    for received, published in ((10.0, 12.0), (100.0, 102.0)):
        speed_of.published(Arrivals(1, None, received, received, None), 1000, published, 0.0)
    assert speed_of.rates() == {LOG_RATE: 500.0}


def test_a_driver_that_is_behind_has_something_to_apply_all_the_time() -> None:
    """What it receives late was committed long ago; the source's clock is an hour ahead of ours."""
    speed_of = ApplyRate(0.0)
    for published in (4.0, 8.0):
        speed_of.published(Arrivals(1, 3600.0, published - 1, published - 1, 3600.0), 1000, published, 3600.0)
    assert speed_of.rates() == {LOG_RATE: 250.0}


def test_the_rate_of_applying_is_that_of_the_last_ten_seconds() -> None:
    speed_of = ApplyRate(0.0)
    for second in range(1, 51):
        distance = 1000 if second <= 30 else 100
        speed_of.published(Arrivals(1, None, 0.0, 0.0, None), distance, float(second), 0.0)
    assert speed_of.rates() == {LOG_RATE: 100.0}


def test_batches_are_as_long_as_allowed_until_their_cost_is_known() -> None:
    assert Pace(0.2, 1.0).interval == 1.0


@pytest.mark.parametrize(("tables", "seconds", "interval"), [(1, 0.01, 0.2), (4, 0.01, 0.5), (50, 0.01, 1.0)])
def test_the_more_commits_a_batch_costs_the_longer_it_grows(tables: int, seconds: float, interval: float) -> None:
    pace = Pace(0.2, 1.0)
    for _ in range(30):
        pace.applied(seconds, tables)
    assert pace.interval == pytest.approx(interval)
    assert (tables + 1) / pace.interval <= COMMITS_PER_SECOND or interval == 1.0


def test_batches_are_as_far_apart_as_a_user_wants_and_a_longest_time_below_that_says_nothing() -> None:
    pace = Pace(5.0, 1.0)
    assert pace.interval == 5.0
    pace.applied(0.01, 1)
    assert pace.interval == 5.0


def test_a_slow_lake_gets_longer_batches() -> None:
    pace = Pace(0.2, 10.0)
    for _ in range(30):
        pace.applied(2.0, 1)
    assert pace.interval == pytest.approx(4.0)


def test_after_a_step_of_the_load_the_interval_has_settled_within_ten_batches() -> None:
    pace = Pace(0.2, 60.0)
    for _ in range(50):
        pace.applied(0.01, 1)
    for _ in range(10):
        pace.applied(5.0, 1)
    assert pace.interval == pytest.approx(10.0, rel=0.05)
