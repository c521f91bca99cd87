"""Jobs of one's own on a cut: as a Spark job, or with the cut in a file for any other."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from headwater.errors import EXIT_REFUSED
from headwater_airflow import lineage
from headwater_airflow.operators.spark_job import HeadwaterSparkOperator

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context


class SparkOnCutOperator(HeadwaterSparkOperator):
    """A Spark job of your own that reads one consistent cut.

    `cut` is what a FreshnessSensor returned (`sensor.output`), also one that fell back to the source. The job gets
    the path of a file with the cut as its first argument (a cut of many tables is longer than an argument may be),
    then `application_args`:

        cut = json.loads(Path(sys.argv[1]).read_text())
        orders = headwater.read(spark, cut)["public.orders"]

    Of Headwater's settings the job gets what reads Delta tables (`headwater.session.submit_conf`), and nothing else. It
    runs in the task's Python, with Headwater in its path, unless `conf` names another (`spark.pyspark.driver.python`),
    in which Headwater must be installed.

    The XCom is the last line of its output that is a JSON object. A job that fails is tried again, whatever its exit
    status, except that it may hand on what Headwater refused: with the error's JSON as such a line, and exit status 2.
    """

    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "cut")

    def __init__(self, *, application: str, cut: Any, **arguments: Any) -> None:
        super().__init__(pipeline="", application=application, **arguments)
        self.cut = cut

    def execute(self, context: Context) -> dict[str, Any] | None:
        with cut_file(self.cut) as file:
            self.application_args = [file, *(self.application_args or ())]
            return super().execute(context)

    def in_words(self) -> str:
        return f"{super().in_words()} {on_cut(self.cut)}"

    def spark_conf(self) -> dict[str, str]:
        from headwater.spark.session import submit_conf

        # A cut that fell back to the source names no places.
        return submit_conf(next((table["path"] for table in self.cut["tables"].values() if table["path"]), ""))

    def environment(self) -> dict[str, str]:
        found = super().environment()
        if (self.conf or {}).get("spark.pyspark.driver.python"):
            # Another Python than the task's has modules of its own, and this one's might go before them.
            found.pop("PYTHONPATH")
        return found

    def why_final(self, status: int | None, error: Mapping[str, Any]) -> str | None:
        # The statuses of other programs mean something else: a Python that cannot open its file ends with 2.
        refused = status == EXIT_REFUSED and {"code", "message", "remedy"} <= error.keys()
        return super().why_final(status, error) if refused else None

    def pipeline_name(self) -> str:
        return str(self.cut["pipeline"])

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.read_cut(self.cut)

    def _connections(self) -> tuple[str | None, str]:
        # Most cuts are read from the lake only, as the job enters it; one that fell back, at the source.
        if "fallback" not in self.cut:
            return None, ""
        self.pipeline = self.cut["fallback"]["pipeline_file"]
        return super()._connections()


@contextlib.contextmanager
def cut_file(cut: Any) -> Iterator[str]:
    """The path of a file with `cut`, while the block lasts: a cut of many tables is longer than an argument may be."""
    if not isinstance(cut, dict) or "tables" not in cut:
        raise AirflowFailException("there is no cut to read: hand over the output of a FreshnessSensor")
    with tempfile.TemporaryDirectory(prefix="headwater_cut_") as folder:
        file = Path(folder) / "cut.json"
        file.write_text(json.dumps(cut), encoding="utf-8")
        yield os.fspath(file)


def on_cut(cut: Mapping[str, Any] | None) -> str:
    """Which one a job reads, in words; None: the newest one."""
    if cut is None:
        return "on the newest cut"
    if "fallback" in cut:
        return "on what the source holds"
    # One that somebody has put together needs no more than tables.
    return f"on the cut of epoch {cut['epoch']}" if "epoch" in cut else "on a cut"
