"""Applying a plan: one Delta commit per table, carrying rows and applied position together.

Every worker thread has a Spark session of its own, because the `txn` entry of a commit is a session setting. A
commit that is not exactly the planned version + 1 is a lost race: usually nothing was committed and the caller
plans again from what is there now.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.errors import ForeignWrite
from headwater.lake import merge, write
from headwater.lake.plan import Applied, Plan, PlanAgain
from headwater.lake.tables import commits_after

_APP = "spark.databricks.delta.write.txnAppId"
_VERSION = "spark.databricks.delta.write.txnVersion"
_LAST_COMMIT = "spark.databricks.delta.lastCommitVersionInSession"


class Applier:
    """Applies plans on one long-lived Spark session; safe from several threads, each table in one at a time."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._local = threading.local()

    def apply(self, plan: Plan) -> Applied:
        """Commit `plan`. PlanAgain when another commit came first; ForeignWrite when one slipped in between."""
        if commits_after(plan.path, plan.version):
            raise PlanAgain
        spark = self._session()
        paths = {"append": write.append, "replace": write.replace, "merge": merge.merge}
        with _transaction(spark, plan.app_id, plan.to_lsn):
            try:
                divergence, example = paths[plan.apply_path](spark, plan)
            except PySparkException as error:
                if "DELTA_CONCURRENT" in str(error) or "Concurrent" in type(error).__name__:
                    raise PlanAgain from error
                raise
            version = spark.conf.get(_LAST_COMMIT, "")
        if not version:
            # Delta saw our position in the table already: a late commit of a fenced predecessor.
            raise PlanAgain
        return Applied(int(version), divergence, example, _note_others(plan, int(version)))

    def _session(self) -> SparkSession:
        session: SparkSession | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = self._spark.newSession()
            # The source of a MERGE is an Arrow table of ours: the same at every reading, so no copy need be kept of it.
            session.conf.set("spark.databricks.delta.merge.materializeSource", "none")
        return session


@contextmanager
def _transaction(spark: SparkSession, app_id: str, to_lsn: int) -> Iterator[None]:
    spark.conf.set(_APP, app_id)
    spark.conf.set(_VERSION, str(to_lsn))
    spark.conf.unset(_LAST_COMMIT)
    try:
        yield
    finally:
        spark.conf.unset(_APP)
        spark.conf.unset(_VERSION)


def _note_others(plan: Plan, version: int) -> str:
    between = [c for c in commits_after(plan.path, plan.version) if c.version < version]
    for commit in between:
        if commit.data:
            raise ForeignWrite(
                f"version {commit.version} ({commit.operation}) was committed by somebody else while version {version} "
                "was being written",
                where=plan.record.name,
                remedy=f"headwater load PIPELINE.yaml --table {plan.record.name} --again",
            )
    return ", ".join(f"{commit.operation} at version {commit.version}" for commit in between)
