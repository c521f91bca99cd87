"""Options of one table as they hold: its own, else the pipeline's defaults."""

from __future__ import annotations

from headwater.pipeline_file.pipeline import Pipeline, TableEntry


def on_schema_change(pipeline: Pipeline, entry: TableEntry | None) -> str:
    return (entry.on_schema_change if entry is not None else None) or pipeline.defaults.on_schema_change


def on_divergence(pipeline: Pipeline, entry: TableEntry | None) -> str:
    return (entry.on_divergence if entry is not None else None) or pipeline.defaults.on_divergence
