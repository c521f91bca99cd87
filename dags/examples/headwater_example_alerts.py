"""Example: a message by e-mail and by Slack when a table is later than the pipeline file allows, and when a wait fails.

$HEADWATER_EXAMPLE_PIPELINE is the pipeline's file (default: shop.yaml in the pipelines' folder), with `freshness` for a
table. The messages go through Airflow's own notifiers: the connections `smtp_default` (apache-airflow-providers-smtp)
and `slack_default` (apache-airflow-providers-slack, an incoming webhook). $HEADWATER_EXAMPLE_MAIL_TO is who gets the
e-mail; without it the DAGs are not there.
"""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowSkipException

from headwater_airflow.assets import late, late_of
from headwater_airflow.configuration import pipelines_folder
from headwater_airflow.sensors.freshness import FreshnessSensor

pipeline = os.environ.get("HEADWATER_EXAMPLE_PIPELINE") or os.path.join(pipelines_folder() or "", "shop.yaml")
mail_to = os.environ.get("HEADWATER_EXAMPLE_MAIL_TO", "")

LATE = """{% set lines = ti.xcom_pull('late_tables') %}{{ lines | join('\\n') }}"""
# Of a task whose process was killed Airflow knows no exception.
FAILED = "{{ dag.dag_id }}, {{ ti.task_id }}: {{ exception | default('the task was killed: see its log', true) }}"


def as_html(text: str) -> str:
    return f"<pre>{{% filter e %}}{text}{{% endfilter %}}</pre>"


if os.path.exists(pipeline) and mail_to:
    # Here, since they are not everybody's.
    from airflow.providers.slack.notifications.slack_webhook import SlackWebhookNotifier
    from airflow.providers.smtp.notifications.smtp import SmtpNotifier

    with DAG(
        "headwater_example_late",
        description="Says which tables are later than the pipeline file allows, once for each and again every hour",
        schedule=[late(pipeline, remind_every="1h")],
        max_active_runs=1,
        is_paused_upon_creation=False,  # a paused DAG gets no events
        tags=["headwater", "example"],
    ):

        @task(
            on_success_callback=[
                SmtpNotifier(
                    to=mail_to,
                    subject="Late tables",
                    html_content=as_html(LATE),
                ),
                SlackWebhookNotifier(slack_webhook_conn_id="slack_default", text=LATE),
            ]
        )
        def late_tables(triggering_asset_events: Any = None) -> list[str]:
            found_late = late_of(triggering_asset_events)
            if not found_late:
                raise AirflowSkipException("no event says that a table is late: this run was started by hand")
            return [
                f"{table} is {found['lag_seconds']} s behind; {found['freshness_seconds']} s are allowed. "
                f"{found['reason'] or ''}"
                for table, found in found_late.items()
            ]

        late_tables()

    with DAG(
        "headwater_example_failed",
        description="Waits, and says why and what to do if the lake is not fresh in time",
        schedule=None,
        catchup=False,
        # The same list as default_args of headwater_dags(...) tells of failed loads, slices and validations.
        default_args={
            "on_failure_callback": [
                SmtpNotifier(
                    to=mail_to,
                    subject="{{ ti.task_id }} failed",
                    html_content=as_html(FAILED),
                ),
                SlackWebhookNotifier(slack_webhook_conn_id="slack_default", text=FAILED),
            ]
        },
        tags=["headwater", "example"],
    ):
        FreshnessSensor(task_id="fresh", pipeline=pipeline, require="now", max_wait="10m")
