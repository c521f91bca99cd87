"""When Airflow begins slices: asked as its scheduler and its DAG processor ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from airflow.timetables.base import DagRunInfo, DataInterval
    from pendulum import DateTime

pytestmark = pytest.mark.usefixtures("airflow_home")

PERIOD = 540.0


@pytest.fixture
def moment() -> Iterator[DateTime]:
    """The clock stands."""
    import pendulum

    frozen = pendulum.datetime(2026, 11, 21, 12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwater_airflow.timetable.now", lambda zone: frozen)
        yield frozen


def _next(
    last: DataInterval | None, *, earliest: DateTime | None = None, latest: DateTime | None = None
) -> DagRunInfo | None:
    from airflow.timetables.base import TimeRestriction

    from headwater_airflow.timetable import OverlappingSlices

    restriction = TimeRestriction(earliest, latest, catchup=False)
    return OverlappingSlices(PERIOD).next_dagrun_info(last_automated_data_interval=last, restriction=restriction)


def _interval(start: DateTime, end: DateTime) -> DataInterval:
    from airflow.timetables.base import DataInterval

    return DataInterval(start, end)


def _begin(info: DagRunInfo | None) -> DateTime:
    assert info is not None
    return info.run_after


def test_the_first_slice_begins_at_once(moment: DateTime) -> None:
    first = _next(None, earliest=moment.subtract(years=2))
    assert first is not None
    assert first.run_after == moment
    assert first.data_interval == _interval(moment.subtract(years=2), moment)


def test_the_next_slice_begins_a_period_after_the_last_whenever_it_is_asked_for(moment: DateTime) -> None:
    for ago in (0, 5, 539):
        begun = moment.subtract(seconds=ago)
        assert _begin(_next(_interval(begun.subtract(minutes=9), begun))) == begun.add(seconds=PERIOD)


def test_runs_have_different_dates_and_intervals_without_a_gap(moment: DateTime) -> None:
    info, dates = _next(None, earliest=moment.subtract(years=2)), set()
    for _ in range(4):
        assert info is not None
        assert info.data_interval is not None
        assert info.logical_date not in dates
        dates.add(info.logical_date)
        following = _next(info.data_interval)
        assert following is not None
        assert following.data_interval is not None
        assert following.data_interval.start == info.data_interval.end
        info = following


def test_after_a_long_pause_one_slice_begins_at_once_and_none_is_made_up_for(moment: DateTime) -> None:
    hours_ago = moment.subtract(hours=5)
    info = _next(_interval(hours_ago.subtract(minutes=9), hours_ago))
    assert info is not None
    assert info.run_after == moment
    assert _begin(_next(info.data_interval)) == moment.add(seconds=PERIOD)


def test_the_history_of_a_dag_that_was_continuous_is_gone_on_with(moment: DateTime) -> None:
    """Its last run's interval ends when it began; its date was the beginning of that interval."""
    last = _interval(moment.subtract(minutes=20), moment.subtract(minutes=10))
    info = _next(last, earliest=moment.subtract(years=2))
    assert info is not None
    assert info.run_after == moment
    assert info.logical_date == last.end


def test_start_and_end_date_are_kept(moment: DateTime) -> None:
    later = moment.add(days=1)
    assert _begin(_next(None, earliest=later)) == later
    begun = moment.subtract(seconds=10)
    assert _next(_interval(begun, begun), latest=moment) is None


def test_a_manual_run_has_its_own_moment(moment: DateTime) -> None:
    from headwater_airflow.timetable import OverlappingSlices

    assert OverlappingSlices(PERIOD).infer_manual_data_interval(run_after=moment) == _interval(moment, moment)


def test_it_survives_being_stored_and_is_found_by_its_registration() -> None:
    from airflow.serialization.decoders import decode_timetable
    from airflow.serialization.encoders import encode_timetable

    from headwater_airflow.timetable import OverlappingSlices

    stored = json.loads(json.dumps(encode_timetable(OverlappingSlices(PERIOD))))
    again = decode_timetable(stored)
    assert again == OverlappingSlices(PERIOD)
    assert again.summary == "every 540 s, overlapping"
    assert again.active_runs_limit == 2


def _write_pipeline(file: Path) -> None:
    file.write_text(
        f"pipeline: shop\nsource: {{connection: 'postgresql://a:b@127.0.0.1:1/c'}}\n"
        f"lake: {{root: 'file://{file.parent}/lake'}}\ntables: [public.a]\n"
    )


def test_reloads_begin_by_a_backfill_alone_which_has_a_run_for_each_interval(tmp_path: Path) -> None:
    from airflow.serialization.definitions.dag import SerializedDAG
    from airflow.serialization.serialized_objects import DagSerialization
    from airflow.timetables.base import TimeRestriction
    from pendulum import datetime

    from headwater_airflow.dag_factory import headwater_dags

    _write_pipeline(tmp_path / "shop.yaml")
    made = headwater_dags(tmp_path / "shop.yaml", backfill_intervals="@weekly")["shop.reload"]
    dag = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(made))))
    assert isinstance(dag, SerializedDAG)
    assert dag.timetable.periodic, "Airflow refuses backfills of what is not"
    never = dag.timetable.next_dagrun_info_v2(
        last_dagrun_info=None, restriction=TimeRestriction(datetime(2026, 1, 1), None, catchup=False)
    )
    assert never is None
    found = [info.data_interval for info in dag.iter_dagrun_infos_between(datetime(2026, 3, 1), datetime(2026, 3, 20))]
    assert [(one.start.date().isoformat(), one.end.date().isoformat()) for one in found if one is not None] == [
        ("2026-03-01", "2026-03-08"),
        ("2026-03-08", "2026-03-15"),
        ("2026-03-15", "2026-03-22"),
    ]


def test_the_stored_dag_asks_its_timetable_for_the_next_run(tmp_path: Path) -> None:
    """As the DAG processor does: through the serialized DAG, with Airflow's own restriction."""
    import pendulum
    from airflow.serialization.serialized_objects import DagSerialization
    from airflow.timetables.base import DagRunInfo

    from headwater_airflow.dag_factory import headwater_dags

    _write_pipeline(tmp_path / "shop.yaml")
    dag = headwater_dags(tmp_path / "shop.yaml", slice_seconds=90, warm_up_seconds=30)["shop.replicate"]
    stored = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))
    assert stored.max_active_runs == 2
    before = pendulum.now("UTC")
    first = stored.next_dagrun_info(last_automated_run_info=None)
    assert first is not None
    assert before <= first.run_after <= pendulum.now("UTC")
    second = stored.next_dagrun_info(last_automated_run_info=first)
    assert isinstance(second, DagRunInfo)
    assert second.run_after - first.run_after == timedelta(seconds=60)


def test_slices_that_would_begin_without_end_are_refused() -> None:
    from airflow.exceptions import AirflowTimetableInvalid

    from headwater_airflow.timetable import OverlappingSlices

    with pytest.raises(AirflowTimetableInvalid, match=r"0\.5 s apart"):
        OverlappingSlices(0.5).validate()
