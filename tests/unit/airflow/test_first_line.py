"""How a task's log begins: with what it does, in words; the command of spark-submit is folded."""

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
        ("Replicate", {"max_seconds": 2592000.5, "stop_when_paused": False}, "replicates for 2592000.5 s"),
        ("Replicate", {"max_seconds": None, "stop_when_paused": False}, "replicates until it is stopped"),
        ("Maintain", {"tables": [A]}, f"compacts {A}, and removes what no cut needs"),
        ("Verify", {}, "compares all tables with the source"),
        ("Verify", {"tables": A, "repair": "true"}, f"compares {A} with the source, and repairs what differs"),
        ("Validate", {"tables": [A]}, f"validates {A} on the newest cut"),
        ("Validate", {"cut": CUT}, "validates all tables on the cut of epoch 7"),
        ("SparkOnCut", {**JOB, "cut": CUT}, "runs report.py on the cut of epoch 7"),
        ("SparkOnCut", {**JOB, "cut": {"pipeline": "shop", "tables": {}}}, "runs report.py on a cut"),
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


OF_THE_JVM = ["NOTE: Picked up JDK_JAVA_OPTIONS: -Xmx1g", "WARNING: Using incubator modules: jdk.incubator.vector"]


@pytest.mark.parametrize(
    ("said", "folded"),
    [
        ([*OF_THE_JVM, "public.a: reading", OF_THE_JVM[0], "public.a: 3 rows"], OF_THE_JVM),
        (["{}"], []),
        (OF_THE_JVM, OF_THE_JVM),
        ([], []),
    ],
)
def test_what_comes_before_the_jobs_own_words_is_folded_and_nothing_else(
    said: list[str], folded: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submission, program = spark_submit_that(tmp_path, "\n".join(["cat <<'END'", *said, "END"]))
    submission.submit(str(program))
    lines = events(capsys.readouterr().out)
    begin, end = lines.index("::group::spark-submit"), lines.index("::endgroup::")
    assert [line for line in lines[begin + 1 : end] if not line.startswith("Spark-Submit cmd")] == folded
    assert lines[end + 1 :] == said[len(folded) :]
    assert lines.count("::endgroup::") == 1


def test_the_error_of_a_submission_is_not_folded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from airflow.sdk.exceptions import AirflowException

    submission, program = spark_submit_that(tmp_path, "exit 3")
    with pytest.raises(AirflowException, match="3"):
        submission.submit(str(program))
    assert events(capsys.readouterr().out)[-1] == "::endgroup::"


def spark_submit_that(folder: Path, does: str) -> tuple[Any, Path]:
    """A submission whose spark-submit is a shell script, and what stands for the job."""
    from headwater_airflow.operators.submission import SparkSubmission

    program = folder / "spark-submit"
    program.write_text(f"#!/bin/sh\n{does}\n")
    program.chmod(0o755)
    made = SparkSubmission(conn_id="", spark_binary="spark-submit", env_vars={"PATH": f"{folder}:/usr/bin:/bin"})
    made._connection = {**made._connection, "master": "local[1]", "deploy_mode": "client"}
    made._connection["spark_binary"] = str(program)
    return made, folder / "job.py"


def events(printed: str) -> list[str]:
    """What was logged, line by line."""
    return [line.split("] ", 1)[1].rsplit(" [", 1)[0].strip() for line in printed.splitlines() if "[info" in line]
