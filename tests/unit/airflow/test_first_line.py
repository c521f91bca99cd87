"""The first line of a task's log: what it does, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("airflow_home")

CUT: dict[str, Any] = {"pipeline": "shop", "epoch": 7, "tables": {}}
FALLBACK = {**CUT, "fallback": {"pipeline_file": "shop.yaml"}}
A, B = "public.a", "public.b"
JOB = {"application": "/jobs/report.py"}


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        ("Load", {}, "loads all tables, as far as they are not loaded yet"),
        ("Load", {"tables": f'["{A}", "{B}"]', "again": "true"}, f"loads {A}, {B} again"),
        ("Reload", {"table": A, "where": ""}, f"reloads {A}"),
        (
            "Reload",
            {"table": A, "partitions": '["a_1"]', "where": "n > 5"},
            f"reloads a_1, the rows where n > 5 of {A}",
        ),
        ("Reload", {"changed": "true"}, "compares what may have changed in all tables unnoticed, and repairs it"),
        ("Rebuild", {"table": A}, f"brings {A} into the shape that the pipeline file gives it"),
        ("Replicate", {"max_seconds": 600, "stop_when_paused": False}, "replicates for 600 s"),
        ("Replicate", {"max_seconds": None, "stop_when_paused": False}, "replicates until it is stopped"),
        ("Maintain", {"tables": [A]}, f"compacts {A}, and removes what no cut needs"),
        ("Verify", {}, "compares all tables with the source"),
        ("Verify", {"tables": A, "repair": "true"}, f"compares {A} with the source, and repairs what differs"),
        ("Validate", {"tables": [A]}, f"validates {A} on the newest cut"),
        ("Validate", {"cut": CUT}, "validates all tables on the cut of epoch 7"),
        ("SparkOnCut", {**JOB, "cut": CUT}, "runs report.py on the cut of epoch 7"),
        ("SparkOnCut", {**JOB, "cut": FALLBACK}, "runs report.py on what the source holds"),
    ],
)
def test_it_says_what_the_job_does_and_with_what(
    kind: str,
    arguments: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from headwater_airflow.operators import spark

    file = tmp_path / "shop.yaml"
    file.write_text(
        f"pipeline: shop\nsource:\n  connection: postgresql://shop\nlake:\n  root: file://{tmp_path}/lake\n"
        f"tables:\n  - name: {A}\n  - name: {B}\n"
    )
    of = {} if kind == "SparkOnCut" else {"pipeline": str(file)}
    task = getattr(spark, f"{kind}Operator")(task_id="t", **of, **arguments)

    def stop() -> None:
        raise AirflowFailException("so far and no further")

    monkeypatch.setattr(task, "_show_links", stop)
    with pytest.raises(AirflowFailException, match="so far"):
        task.execute({})
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "[info" in line]
    assert f" Pipeline shop: {said} " in line
