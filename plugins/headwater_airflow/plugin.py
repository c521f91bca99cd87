"""The plugin as Airflow registers it. Operators, sensors, hooks and triggers are plain imports: no entry here."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class HeadwaterPlugin(AirflowPlugin):
    name = "headwater"
