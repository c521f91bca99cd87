"""What the entry point `apache_airflow_provider` tells Airflow about this distribution."""

from __future__ import annotations

from typing import Any

_INTEGRATION = "Headwater"


def _option(description: str, kind: str, default: str, example: str | None = None) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": kind,
        "example": example,
        "default": default,
    }


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
        "operators": modules(
            "operators.spark", "operators.replication", "operators.source", "operators.branch", "operators.command"
        ),
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
        "config": {
            "headwater": {
                "description": "Where Headwater's pipelines are, for its DAG files and pages.",
                "options": {
                    "pipelines": _option(
                        "Folder of pipeline files; the environment's HEADWATER_PIPELINES goes before it.",
                        "string",
                        example="/etc/headwater",
                        default="",
                    ),
                    "slice_seconds": _option("How long one run of a pipeline's `.replicate` lasts.", "float", "600"),
                    "warm_up_seconds": _option(
                        "How long before its end the next run begins; at most half a slice; 0: not before.",
                        "float",
                        "60",
                    ),
                    "spark_history_server": _option(
                        "Address of Spark's history server, which tasks link to when their job has ended.",
                        "string",
                        example="http://spark-history:18080",
                        default="",
                    ),
                },
            }
        },
        "extra-links": [
            "headwater_airflow.operators.links.PipelinePageLink",
            "headwater_airflow.operators.links.SparkPageLink",
        ],
        # No "plugins": the entry point `airflow.plugins` registers ours, and Airflow reports a second one as an error.
    }
