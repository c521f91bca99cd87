"""The plugin as Airflow registers it. Operators, sensors, hooks and triggers are plain imports: no entry here."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from headwater_airflow.page.mounted import PREFIX, MountedApp
from headwater_airflow.timetable import BackfillIntervals, OverlappingSlices


class HeadwaterPlugin(AirflowPlugin):
    name = "headwater"
    timetables = [BackfillIntervals, OverlappingSlices]  # noqa: RUF012  # Airflow declares it as an attribute of instances
    fastapi_apps = [{"name": "Headwater", "app": MountedApp(), "url_prefix": PREFIX}]  # noqa: RUF012
    external_views = [  # noqa: RUF012
        {
            "name": "Headwater",
            # Relative: Airflow may live below a path of its own.
            "href": f"{PREFIX.removeprefix('/')}/",
            "destination": "nav",
            "category": "browse",
            "url_route": "headwater",
            "icon": f"{PREFIX.removeprefix('/')}/static/icon/icon.svg",
            "icon_dark_mode": f"{PREFIX.removeprefix('/')}/static/icon/icon-dark.svg",
        }
    ]
