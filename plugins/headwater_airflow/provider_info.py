"""What the entry point `apache_airflow_provider` tells Airflow about this distribution."""

from __future__ import annotations

from typing import Any

_INTEGRATION = "Headwater"


def get_provider_info() -> dict[str, Any]:
    def modules(*names: str) -> list[dict[str, Any]]:
        return [
            {"integration-name": _INTEGRATION, "python-modules": [f"headwater_airflow.{name}" for name in names]},
        ]

    return {
        "package-name": "headwater",
        "name": _INTEGRATION,
        "description": "PostgreSQL to Delta Lake replication, and sensors that wait for the freshness a task needs.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["software"]}],
        "operators": modules("operators.spark", "operators.replication", "operators.source", "operators.branch"),
        "sensors": modules("sensors.freshness"),
        "triggers": modules(
            "triggers.first_look", "triggers.freshness", "triggers.lateness", "triggers.moments", "triggers.movement"
        ),
        "hooks": modules("hooks.connection", "hooks.source"),
        "connection-types": [
            {
                "connection-type": "headwater",
                "hook-class-name": "headwater_airflow.hooks.connection.SourceHook",
                "hook-name": "Headwater source (PostgreSQL)",
            }
        ],
        "extra-links": ["headwater_airflow.operators.links.PipelinePageLink"],
        # No "plugins": the entry point `airflow.plugins` registers ours, and Airflow reports a second one as an error.
    }
