"""What the operators tell OpenLineage: which tables of the source become which Delta tables, column by column.

Airflow's OpenLineage provider asks for this in a process of its own beside the task, and makes a warning in the task's
log of whatever fails here. Without the provider nobody asks, and nothing of OpenLineage is imported. The names are
those of OpenLineage's naming specification, so that they meet what other tools tell of the same tables. Of the source's
connection only host, port and database are told; of a column that is hidden, that it is, and never what stands there.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwater.lake_root import place_of
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN, PARTITION_COLUMN, TableSchema

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from openlineage.client.event_v2 import Dataset, InputDataset, OutputDataset


def copied(pipeline: str, tables: Sequence[str]) -> OperatorLineage:
    """Rows of `tables` (none: of all) go from the source of the pipeline in the file `pipeline` to its lake."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    known = load_pipeline(pipeline)
    schemas = _schemas(known, tables)
    source = _source(known)
    return OperatorLineage(
        inputs=[_source_table(source, name) for name in schemas],
        outputs=[_written(known, name, schema, _source_table(source, name)) for name, schema in schemas.items()],
    )


def rewritten(pipeline: str, tables: Sequence[str]) -> OperatorLineage:
    """Rows that are in the lake already are written there anew."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    known = load_pipeline(pipeline)
    schemas = _schemas(known, tables)
    return OperatorLineage(
        inputs=[_lake_table(known, name) for name in schemas],
        outputs=[_written(known, name, schema, _lake_table(known, name)) for name, schema in schemas.items()],
    )


def compared(pipeline: str, tables: Sequence[str]) -> OperatorLineage:
    """Source and lake are read."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    known = load_pipeline(pipeline)
    names = _schemas(known, tables)
    source = _source(known)
    return OperatorLineage(
        inputs=[dataset for name in names for dataset in (_source_table(source, name), _lake_table(known, name))]
    )


def validated(pipeline: str, tables: Sequence[str], result: Mapping[str, Any] | None) -> OperatorLineage:
    """The lake is read; `result`, once it is there, says at which versions, and which suites were met."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    known = load_pipeline(pipeline)
    found = (result or {}).get("tables", {})
    inputs = []
    for name in _schemas(known, tables):
        dataset, of_table = _lake_table(known, name), found.get(str(name), {})
        if of_table.get("suites"):
            dataset.inputFacets = {"dataQualityAssertions": _assertions(of_table["suites"])}
        inputs.append(_at_version(dataset, of_table.get("version")))
    return OperatorLineage(inputs=inputs)


def read_cut(cut: Mapping[str, Any]) -> OperatorLineage:
    """The tables of `cut` are read at its versions; of one that fell back, at the source."""
    from airflow.providers.openlineage.extractors import OperatorLineage

    if "fallback" in cut:
        source = _source(load_pipeline(cut["fallback"]["pipeline_file"]))
        return OperatorLineage(inputs=[_source_table(source, TableName.parse(name)) for name in cut["tables"]])
    there = [table for table in cut["tables"].values() if table["version"] is not None]
    return OperatorLineage(
        inputs=[_at_version(_delta_table(place_of(table["path"])), table["version"]) for table in there]
    )


def _schemas(pipeline: Pipeline, tables: Sequence[str]) -> dict[TableName, TableSchema | None]:
    """The tables that are meant, in order of their names; those that the lake has already with its newest schema."""
    from headwater.lake.reader import LakeReader
    from headwater_airflow.hooks.store import fetch_in_task

    named = {TableName.parse(table) for table in tables}
    listed = {entry.name for entry in pipeline.tables if isinstance(entry.name, TableName)}
    found: dict[TableName, TableSchema | None] = dict.fromkeys(named or listed)
    fetch_in_task()
    registry = LakeReader(pipeline.lake_path(), pipeline.name).registry()
    for record in registry.tables.values() if registry is not None else ():
        name = TableName.parse(record.name)
        if name in found or (not named and record.state != "removed"):
            found[name] = record.schema if record.schemas else None
    return dict(sorted(found.items()))


def _source(pipeline: Pipeline) -> tuple[str, str, str]:
    """Host, port and database, with what libpq takes where the connection names none."""
    from psycopg import pq
    from psycopg.conninfo import conninfo_to_dict

    from headwater_airflow.hooks.source import connection_uri

    conn_id = pipeline.source.airflow_connection
    given = conninfo_to_dict(pipeline.conninfo() if conn_id is None else connection_uri(conn_id))
    for option in pq.Conninfo.get_defaults():
        if option.val is not None:
            given.setdefault(option.keyword.decode(), option.val.decode())
    host = str(given.get("host") or given.get("hostaddr") or "localhost").partition(",")[0]
    port = str(given.get("port") or "").partition(",")[0]
    # A folder is that of a socket of this machine.
    return "localhost" if host.startswith("/") else host, port, str(given.get("dbname") or given.get("user"))


def _source_table(source: tuple[str, str, str], table: TableName) -> InputDataset:
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.naming.dataset import Postgres

    host, port, database = source
    named = Postgres(host, port, database, table.schema, table.name)
    return InputDataset(named.get_namespace(), named.get_name())


def _lake_table(pipeline: Pipeline, table: TableName) -> InputDataset:
    return _delta_table(posixpath.join(place_of(pipeline.lake.root), table.path))


def _delta_table(place: str) -> InputDataset:
    from openlineage.client.event_v2 import InputDataset
    from openlineage.client.naming.dataset import ABFSS, GCS, S3, LocalFileSystem

    scheme, _, rest = place.partition("://")
    bucket, _, key = rest.partition("/")
    named: Any = LocalFileSystem(place)
    if scheme == "s3":
        named = S3(bucket, key)
    elif scheme == "gs":
        named = GCS(bucket, key)
    elif scheme == "abfss":
        container, _, host = bucket.partition("@")
        named = ABFSS(container, host.partition(".")[0], key)
    return InputDataset(named.get_namespace(), named.get_name())


def _written(pipeline: Pipeline, table: TableName, schema: TableSchema | None, origin: Dataset) -> OutputDataset:
    """The Delta table, with its columns and where they come from, once it is known."""
    from openlineage.client.event_v2 import OutputDataset
    from openlineage.client.generated.schema_dataset import SchemaDatasetFacet, SchemaDatasetFacetFields

    named = _lake_table(pipeline, table)
    dataset = OutputDataset(named.namespace, named.name)
    if schema is not None:
        fields = [SchemaDatasetFacetFields(name, kind) for name, kind in _columns(schema).items()]
        dataset.facets = {"schema": SchemaDatasetFacet(fields), "columnLineage": _origins(schema, origin)}
    return dataset


def _columns(schema: TableSchema) -> dict[str, str]:
    """Names and types in the lake, Headwater's own included."""
    columns = {column.name: column.value.lake for column in schema.columns}
    if schema.partitioned:
        columns[PARTITION_COLUMN] = "bigint"
    if schema.soft_delete:
        columns |= {DELETED: "boolean", DELETED_LSN: "bigint", DELETED_AT: "timestamp"}
    return columns


def _origins(schema: TableSchema, origin: Dataset) -> Any:
    from openlineage.client.generated.column_lineage_dataset import (
        ColumnLineageDatasetFacet,
        Fields,
        InputField,
        Transformation,
    )

    def of(column: str, hidden: bool) -> Fields:
        how = Transformation("DIRECT", "TRANSFORMATION" if hidden else "IDENTITY", masking=hidden)
        return Fields([InputField(origin.namespace, origin.name, column, [how])])

    return ColumnLineageDatasetFacet(
        {column.name: of(column.name, column.hidden is not None) for column in schema.columns}
    )


def _at_version(dataset: InputDataset, version: int | None) -> InputDataset:
    from openlineage.client.generated.dataset_version_dataset import DatasetVersionDatasetFacet

    if version is not None:
        dataset.facets = {**(dataset.facets or {}), "version": DatasetVersionDatasetFacet(str(version))}
    return dataset


def _assertions(suites: Mapping[str, Mapping[str, int]]) -> Any:
    from openlineage.client.generated.data_quality_assertions_dataset import (
        Assertion,
        DataQualityAssertionsDatasetFacet,
    )

    return DataQualityAssertionsDatasetFacet(
        [Assertion(f"suite {name}", success=not suite["failed"]) for name, suite in suites.items()]
    )
