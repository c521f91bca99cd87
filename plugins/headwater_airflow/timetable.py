"""When runs of Headwater's DAGs begin by themselves, where no cron expression says it.

The slices of `<pipeline>.replicate` begin each a little before the one before it ends, so that two overlap.

`@continuous` allows one run at a time: between two slices nothing replicates while the scheduler notices the end, a
JVM starts and a driver connects. Here the next run begins while the last one still works, makes everything ready, and
takes over (`headwater replicate --take-over`).

The time between two beginnings is fixed. So a run that fails is not followed by the next at once, whatever the reason:
what a retry can help is retried within the run.

`<pipeline>.reload` has intervals, which a backfill goes by, and no run of its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.exceptions import AirflowTimetableInvalid
from airflow.timetables.base import DagRunInfo, DataInterval, TimeRestriction, Timetable
from airflow.timetables.interval import CronDataIntervalTimetable
from pendulum import DateTime, now


class OverlappingSlices(Timetable):
    """A run every `period_seconds` at the latest, of which two may be active. Missed ones are not made up for.

    The data interval of a run reaches from the beginning of the one before to its own.
    """

    description = "Slices that overlap: the next one takes over from the last without a pause"
    active_runs_limit = 2

    def __init__(self, period_seconds: float) -> None:
        self.period_seconds = period_seconds

    @property
    def summary(self) -> str:
        return f"every {self.period_seconds:g} s, overlapping"

    def validate(self) -> None:
        if not self.period_seconds >= 1:
            raise AirflowTimetableInvalid(f"slices cannot begin {self.period_seconds:g} s apart: give at least 1")

    def serialize(self) -> dict[str, Any]:
        return {"period_seconds": self.period_seconds}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> OverlappingSlices:
        return cls(data["period_seconds"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OverlappingSlices) and other.period_seconds == self.period_seconds

    def __hash__(self) -> int:
        return hash((OverlappingSlices, self.period_seconds))

    def infer_manual_data_interval(self, *, run_after: DateTime) -> DataInterval:
        return DataInterval.exact(run_after)

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        moment = now("UTC")
        earliest = restriction.earliest or moment
        if last_automated_data_interval is None:
            start, begin = earliest, max(earliest, moment)
        else:
            start = last_automated_data_interval.end
            # Paused, or without a scheduler, for longer than that: one run now, and none for what was missed.
            begin = max(earliest, moment, start + timedelta(seconds=self.period_seconds))
        if restriction.latest is not None and begin > restriction.latest:
            return None
        return DagRunInfo.interval(start, begin)


class BackfillIntervals(CronDataIntervalTimetable):
    """The intervals of a cron expression, for backfills: the scheduler begins none. In UTC."""

    description = "Runs when it is triggered, and for each of these intervals that a backfill asks for"

    def __init__(self, cron: str) -> None:
        super().__init__(cron, "UTC")
        self.cron = cron

    @property
    def summary(self) -> str:
        return f"backfills by {self.cron}"

    def serialize(self) -> dict[str, Any]:
        return {"cron": self.cron}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> BackfillIntervals:
        return cls(data["cron"])

    def next_dagrun_info(
        self, *, last_automated_data_interval: DataInterval | None, restriction: TimeRestriction
    ) -> DagRunInfo | None:
        # Only a backfill makes up for the past: the DAG's own `catchup` is off.
        if not restriction.catchup:
            return None
        return super().next_dagrun_info(
            last_automated_data_interval=last_automated_data_interval, restriction=restriction
        )
