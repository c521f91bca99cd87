"""The labels of columns that are enums, as the source has them now; nothing where it does not answer.

The registry has no labels, and a label may be added without a change of any table.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping

import psycopg

from headwater.errors import HeadwaterError
from headwater.pipeline_file.pipeline import Pipeline
from headwater.schema import TableSchema
from headwater.source.connection import connect

log = logging.getLogger(__name__)

_SECONDS = 10.0


def enum_labels(pipeline: Pipeline, schemas: Mapping[str, TableSchema]) -> dict[str, dict[str, list[str]]]:
    """By table and column. Not of columns that are hashed or masked: the lake holds no labels there."""
    types = sorted({column.type_oid for schema in schemas.values() for column in schema.columns})
    try:
        with contextlib.closing(
            connect(pipeline.conninfo(), application_name="headwater validate", statement_timeout=_SECONDS)
        ) as connection:
            rows = connection.execute(
                # A domain is as its base type.
                """
                select t.oid::bigint, array_agg(e.enumlabel::text order by e.enumsortorder)
                  from pg_type t join pg_enum e on e.enumtypid = coalesce(nullif(t.typbasetype, 0), t.oid)
                 where t.oid = any(%s::oid[])
                 group by t.oid
                """,
                [types],
            ).fetchall()
    except (HeadwaterError, psycopg.Error) as error:
        log.warning("the labels of enums are not checked, the source does not tell them: %s", type(error).__name__)
        return {}
    labels = {int(oid): list(found) for oid, found in rows}
    return {
        name: {
            column.name: labels[column.type_oid]
            for column in schema.columns
            if column.type_oid in labels and column.hidden is None
        }
        for name, schema in schemas.items()
    }
