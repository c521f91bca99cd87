"""Spark and a lake in S3: it reads there, its commits exclude others, and nobody is shown a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fixtures import spark_in_s3
from fixtures.entry_race import ENTRY
from fixtures.object_stores import S3Server, absent
from headwater.spark.jars import store_jar_paths

pytestmark = pytest.mark.spark

PROGRAM = Path(spark_in_s3.__file__)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def found(s3_server: S3Server, events: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the program has found; its events are in a log."""
    if not store_jar_paths("s3"):
        absent("the jars by which Spark reads in S3 are not there: `make servers` fetches them")
    given = {
        "folder": str(tmp_path_factory.mktemp("program")),
        "place": s3_server.uri(s3_server.bucket(), "lake"),
        "endpoint": s3_server.endpoint,
        "region": s3_server.region,
        "keys": {"access_key_id": s3_server.access_key, "secret_access_key": s3_server.secret_key},
    }
    settings = {
        "eventLog.enabled": "true",
        "eventLog.compress": "false",
        "eventLog.dir": events.as_uri(),
        "ui.enabled": "true",
        "ui.port": "0",
    }
    conf = " ".join(f"--conf spark.{name}={value}" for name, value in settings.items())
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
        "PYSPARK_SUBMIT_ARGS": f"{conf} {os.environ['PYSPARK_SUBMIT_ARGS']}",
        "PYTHONPATH": str(PROGRAM.parents[1]),
    }
    ran = subprocess.run(
        [sys.executable, PROGRAM],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def test_spark_writes_and_reads_a_table_at_the_place_that_the_lake_has(found: dict[str, Any]) -> None:
    assert (found["rows"], found["rows of version 0"]) == (8, 10)


def test_an_entry_that_came_while_spark_was_writing_its_own_stays(found: dict[str, Any]) -> None:
    """Delta's own log store looks first and then writes, under a lock that no other process keeps to."""
    ending, content = found["held up"]
    assert "FileAlreadyExistsException" in ending
    assert content == ENTRY.decode()


def test_of_two_commits_at_the_same_moment_exactly_one_succeeds(found: dict[str, Any]) -> None:
    outcomes = Counter((ours, sparks) for ours, sparks, _ in found["race"])
    assert set(outcomes) == {(True, False), (False, True)}
    for ours, _, content in found["race"]:
        assert content == (ENTRY.decode() if ours else "of Spark\n")


def test_a_commit_that_is_refused_because_of_itself_has_succeeded(found: dict[str, Any]) -> None:
    """The client repeats one whose answer was lost, and is told that its name is taken."""
    first, again, another = found["put again"]
    assert (first, again) == ("done", "done")
    assert "FileAlreadyExistsException" in another


def test_a_session_reads_on_with_keys_that_were_exchanged_and_what_it_was_reading_goes_on(
    found: dict[str, Any],
) -> None:
    failure, read_on, rows = found["keys exchanged"]
    assert "AWSBadRequestException" in failure, "the keys of before are not used any more"
    assert (read_on, rows) == ("{", 8)


def test_no_secret_is_shown(found: dict[str, Any], events: Path, s3_server: S3Server) -> None:
    secret = s3_server.secret_key
    logged = "".join(file.read_text() for file in events.rglob("*") if file.is_file())
    shown = dict(json.loads(found["shown"])["hadoopProperties"])
    names = [
        name for name in shown if name.startswith("fs.s3a.bucket.") and name.endswith(("secret.key", "access.key"))
    ]
    assert len(names) == 2
    assert {shown[name] for name in names} == {"*********(redacted)"}
    assert names[0] in logged
    for text in (found["shown"], logged, found["command line"], json.dumps(found["settings"])):
        assert secret not in text
