"""The plugin as Airflow registers it. Operators, sensors, hooks and triggers are plain imports: no entry here."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from headwater_airflow.timetable import OverlappingSlices


class HeadwaterPlugin(AirflowPlugin):
    name = "headwater"
    timetables = [OverlappingSlices]  # noqa: RUF012  # Airflow declares it as an attribute of instances
