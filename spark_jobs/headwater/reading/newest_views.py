"""`headwater.views`, `headwater.register`: views of a pipeline's newest epoch, or of a cut that the caller has, and its
tables, in the catalog of a Spark session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from headwater.errors import Refused
from headwater.lake.cuts import Cut, take_cut
from headwater.lake.reader import LakeReader
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.reading.catalog_views import publish
from headwater.reading.catalog_views import register as register_tables
from headwater.waiting.wait import seconds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def views(
    spark: SparkSession,
    pipeline_or_cut: str | os.PathLike[str] | Pipeline | Mapping[str, Any],
    *,
    database: str | None = None,
    temporary: bool = False,
    allow_behind: bool = False,
    keep_cut: float | str | timedelta = "24h",
) -> dict[str, str]:
    """Make or replace a view for each table of a cut: the one given, or that of all tables at the newest epoch of the
    pipeline (file). `keep_cut`: for how long it is pinned unless it is replaced before; 0: not at all. See
    `headwater.reading.catalog_views.publish`."""
    keep = seconds(keep_cut)
    cut = _cut(pipeline_or_cut)
    return publish(spark, cut, database=database, temporary=temporary, allow_behind=allow_behind, keep=keep)


def register(
    spark: SparkSession,
    pipeline_or_cut: str | os.PathLike[str] | Pipeline | Mapping[str, Any],
    *,
    database: str | None = None,
) -> dict[str, str]:
    """Make a table in the session's catalog for each table of a pipeline (file) or of a cut. See
    `headwater.reading.catalog_views.register`."""
    return register_tables(spark, _cut(pipeline_or_cut), database=database)


def _cut(pipeline_or_cut: str | os.PathLike[str] | Pipeline | Mapping[str, Any]) -> Mapping[str, Any]:
    return pipeline_or_cut if isinstance(pipeline_or_cut, Mapping) else newest_cut(pipeline_or_cut)


def newest_cut(pipeline: str | os.PathLike[str] | Pipeline) -> Cut:
    """The cut of all tables at the newest epoch, as it stands; nothing is waited for. Refused when there is none."""
    found = pipeline if isinstance(pipeline, Pipeline) else load_pipeline(pipeline)
    root = found.lake_path()
    lake = LakeReader(root, found.name)
    look = lake.look()
    if look.file is None or not look.file.epoch:
        raise Refused(
            "no epoch has been published yet",
            code="no_epoch",
            where=f"pipeline {found.name}",
            remedy="headwater replicate PIPELINE.yaml --until now",
        )
    epoch = lake.epoch(look.file.epoch)
    tables = [name for name, table in look.tables.items() if table.state != "removed"]
    return take_cut(root, found.name, look, epoch, tables, epoch.position.lsn)
