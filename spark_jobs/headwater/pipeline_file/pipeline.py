"""The pipeline file: what a person may write, its defaults, and one error that lists every fault at once.

`load_pipeline` is the only door. Keys that are not built yet are unknown. Sizes are bytes and durations seconds
once read. The connection is a secret: no repr, message or dump shows it; `Pipeline.conninfo` gives it out.
Whether server, tables and rights exist is for `check` to say: reading the file touches neither source nor lake.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from headwater import store_connections, store_options, store_profiles
from headwater.errors import BadConfiguration, Refused, Transient, with_file
from headwater.lake_root import is_remote, place_of
from headwater.names import INSERTS_SUFFIX, TableName, TablePattern
from headwater.pipeline_file import yaml as yaml_file
from headwater.pipeline_file.values import (
    airflow_id,
    at_least_one,
    bad_value,
    ceiling_size,
    connection_id,
    connection_value,
    connection_variable,
    count_or_auto,
    distinct,
    duration_value,
    endpoint_value,
    hash_key_value,
    is_conninfo,
    lake_type,
    mask_value,
    name_value,
    pipeline_name,
    positive_count,
    positive_duration,
    positive_size,
    root_value,
    row_filter,
    secret_value,
    slot_name,
    table_value,
    text_value,
    truth_value,
)
from headwater.pipeline_file.yaml import Document, FileProblem, Path
from headwater.store_connections import store_variable
from headwater.store_options import StoreOptions

_PASSWORD = re.compile(r"//[^/@]*:[^/@]*@|(?:password|passwd|secret|token|key)\w*\s*=", re.IGNORECASE)
"""Of an address: user and password, which belong elsewhere; of a connection string, or of settings as a text."""
_STORE_SECRETS = (
    "access_key_id",
    "secret_access_key",
    "session_token",
    "account_key",
    "sas_token",
    "service_account_key",
)
_OF_STORES = {
    "s3": {"region", "path_style", "profile", "access_key_id", "secret_access_key", "session_token"},
    "abfss": {"account_key", "sas_token"},
    "gs": {"service_account_key", "service_account"},
}
"""Keys of `lake.storage` that one kind of store alone knows. `endpoint` is for all: of Google's, whether it is plain
HTTP."""
_PROFILE_GIVES = ("access_key_id", "secret_access_key", "session_token")
_SECRETS: tuple[Path, ...] = (
    ("source", "connection"),
    ("source", "hash_key"),
    *(("lake", "storage", name) for name in _STORE_SECRETS),
)
MOST_CLUSTERED = 4
"""Columns of cluster_by: Delta takes no more."""
_SHORTEST_HASH_KEY = 16
_NO_SUCH_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}
)
"""What a path gives that a person must change; any other error of a read may pass."""


class BadPipelineFile(BadConfiguration):
    """A pipeline file that cannot be used. `problems` are the faults, each with its path and line."""

    def __init__(self, file: str, problems: tuple[FileProblem, ...]) -> None:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"{count} in the pipeline file:" + "".join(f"\n  {problem}" for problem in problems),
            where=file,
            remedy="correct the file; nothing was changed",
        )
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return BadPipelineFile, (self.where, self.problems)

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def _read(reader: Callable[[Any], Any], written: Any) -> PlainValidator:
    """What a person writes is of the type `written`; `reader` makes the value of it, or says what is wrong."""
    return PlainValidator(reader, json_schema_input_type=written)


_Name = Annotated[str, _read(name_value, str)]
_Table = Annotated[TableName | TablePattern, _read(table_value, str), PlainSerializer(str)]
_Columns = Annotated[tuple[_Name, ...], AfterValidator(distinct)]
_BadValue = Annotated[str, _read(bad_value, Literal["suspend", "null", "string"] | None)]
_BadValues = Annotated[
    Annotated[_BadValue, Tag("one")] | Annotated[dict[_Name, _BadValue], Tag("by column")],
    Discriminator(lambda value: "by column" if isinstance(value, dict) else "one"),
]
_Duration = Annotated[float, _read(duration_value, float | str)]
_PositiveDuration = Annotated[float, _read(positive_duration, float | str)]
_PositiveSize = Annotated[int, _read(positive_size, int | str)]
_Ceiling = Annotated[int | None, _read(ceiling_size, int | str)]
_PositiveCount = Annotated[int, _read(positive_count, int | str)]
_Divergence = Literal["suspend", "repair", "report"]
_SchemaChange = Literal["evolve", "suspend"]
_Secret = Annotated[SecretStr | None, _read(secret_value, str), PlainSerializer(str, when_used="unless-none")]
_Freshness = Annotated[float | None, _read(positive_duration, float | str)]


class _Section(BaseModel):
    # Built at first use: five schemas that are parts of the sixth cost a poller's start-up.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)


class Source(_Section):
    connection_text: Annotated[SecretStr, _read(connection_value, str), PlainSerializer(str)] = Field(
        alias="connection"
    )
    publication: _Name = ""
    slot: Annotated[str, _read(slot_name, str)] = ""
    failover: Literal["auto", "on", "off"] = "auto"
    wal_ceiling: _Ceiling = None
    on_timeline_change: Literal["follow", "refuse"] = "refuse"
    on_slot_loss: Literal["refuse", "repair"] = "refuse"
    hash_key: Annotated[str, _read(hash_key_value, str)] = ""

    @field_validator("publication")
    @classmethod
    def _is_no_companion(cls, name: str) -> str:
        """By its name a publication is known for one that publishes no UPDATE and DELETE."""
        if name.endswith(INSERTS_SUFFIX):
            raise ValueError(
                f"expected a name that does not end in {INSERTS_SUFFIX}, as that of the publication for insert-only "
                "tables does (without one it is headwater_ and the pipeline's name)"
            )
        return name

    @property
    def airflow_connection(self) -> str | None:
        """The id of the Airflow connection, when the file names one instead of a connection string."""
        return airflow_id(self.connection_text.get_secret_value())


class Storage(_Section):
    """The object store of the lake, beside what the environment says of it."""

    endpoint: Annotated[str, _read(endpoint_value, str)] = ""
    region: Annotated[str, _read(text_value, str)] = ""
    path_style: Annotated[bool | None, _read(truth_value, bool | str)] = None
    profile: Annotated[str, _read(text_value, str)] = ""
    access_key_id: _Secret = None
    secret_access_key: _Secret = None
    session_token: _Secret = None
    account_key: _Secret = None
    sas_token: _Secret = None
    service_account_key: _Secret = None
    service_account: Annotated[str, _read(text_value, str)] = ""

    def options(self) -> StoreOptions:
        given = {name: getattr(self, name) for name in _STORE_SECRETS}
        secrets = {name: value.get_secret_value() for name, value in given.items() if value is not None}
        if self.service_account:
            secrets["service_account"] = self.service_account
        return StoreOptions(self.endpoint, self.region, self.path_style, tuple(sorted(secrets.items())))


class Lake(_Section):
    root: Annotated[str, _read(root_value, str)]
    airflow: Annotated[str, _read(connection_id, str)] = ""
    storage: Storage = Field(default_factory=Storage)
    keep_cuts: _PositiveDuration = 3600.0

    @model_validator(mode="after")
    def _airflow_for_stores(self) -> Self:
        if self.airflow and not is_remote(place_of(self.root)):
            raise ValueError("airflow names the connection of an object store, and root is a folder")
        return self

    @model_validator(mode="after")
    def _profile_alone(self) -> Self:
        if not self.storage.profile:
            return self
        if not place_of(self.root).startswith("s3:"):
            raise ValueError("storage.profile names keys for S3, and root is elsewhere")
        given = [f"storage.{name}" for name in _PROFILE_GIVES if getattr(self.storage, name) is not None]
        if self.airflow or given:
            other = "airflow" if self.airflow else given[0]
            raise ValueError(f"storage.profile and {other} both say which keys are used: leave one of them out")
        return self

    @model_validator(mode="after")
    def _storage_for_this_store(self) -> Self:
        """What is of no use here is a typing error, or is missing elsewhere: the store would refuse, and jobs would
        take that for an outage."""
        place, given = place_of(self.root), [f"storage.{name}" for name in sorted(self.storage.model_fields_set)]
        if given and not is_remote(place):
            raise ValueError("storage describes an object store, and root is a folder: leave storage out")
        scheme = place.partition("://")[0]
        others = {f"storage.{name}" for store, names in _OF_STORES.items() if store != scheme for name in names}
        if unknown := sorted(others.intersection(given)):
            raise ValueError(f"{', '.join(unknown)}: not for a lake in {scheme}://, leave it out")
        return self


class Load(_Section):
    connections: Annotated[int | Literal["auto"], _read(count_or_auto, int | str)] = 2
    max_connections: _PositiveCount = 8
    wait_for_old_transactions: _Duration = 600.0
    max_snapshot_age: _PositiveDuration = 6 * 3600.0


class Replicate(_Section):
    max_rows: _PositiveCount = 500_000
    max_bytes: _PositiveSize = 256 << 20
    max_seconds: _PositiveDuration = 1.0
    min_seconds: _Freshness = None
    memory: _PositiveSize = 1 << 30
    spill: _PositiveSize = 20 << 30
    retry_seconds: _Duration = 60.0


class Defaults(_Section):
    on_schema_change: _SchemaChange = "evolve"
    on_bad_value: _BadValue = "suspend"
    on_divergence: _Divergence = "suspend"
    freshness: _Freshness = None
    validated: Annotated[bool, _read(truth_value, bool | str)] = False


class Columns(_Section):
    """What becomes of single columns of a table."""

    exclude: _Columns = ()
    hash: _Columns = ()
    mask: dict[_Name, Annotated[str, _read(mask_value, str)]] = Field(default_factory=dict)

    @property
    def hides(self) -> bool:
        """Whether the values of any are hidden."""
        return bool(self.hash or self.mask)


class TableEntry(_Section):
    """One line of `tables`: a table, or a pattern for several. None means: as `defaults` or the source say."""

    name: _Table
    exclude: tuple[_Table, ...] = ()
    key: _Columns | None = None
    types: dict[_Name, Annotated[str, _read(lake_type, str)]] = Field(default_factory=dict)
    partition_by: _Columns = ()
    cluster_by: _Columns = ()
    columns: Columns = Field(default_factory=Columns)
    where: Annotated[str, _read(row_filter, str)] = ""
    insert_only: Annotated[bool | None, _read(truth_value, bool | str)] = None
    soft_delete: Annotated[bool | None, _read(truth_value, bool | str)] = None
    history: Annotated[bool | None, _read(truth_value, bool | str)] = None
    on_schema_change: _SchemaChange | None = None
    on_bad_value: _BadValues | None = None
    on_divergence: _Divergence | None = None
    freshness: _Freshness = None
    validated: Annotated[bool | None, _read(truth_value, bool | str)] = None

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, dict) and value.get("on_bad_value", "") is None:
            # A plain null of YAML is the choice "null" here, not the absence of one.
            return {**value, "on_bad_value": "null"}
        return value

    def covers(self, table: TableName) -> bool:
        """Whether this entry speaks of `table`."""
        if isinstance(self.name, TableName):
            return self.name == table
        excluded = any(e == table if isinstance(e, TableName) else e.matches(table) for e in self.exclude)
        return self.name.matches(table) and not excluded


class Pipeline(_Section):
    """A whole pipeline file."""

    name: Annotated[str, _read(pipeline_name, str)] = Field(alias="pipeline")
    source: Source
    lake: Lake
    load: Load = Field(default_factory=Load)
    replicate: Replicate = Field(default_factory=Replicate)
    defaults: Defaults = Field(default_factory=Defaults)
    tables: Annotated[tuple[TableEntry, ...], BeforeValidator(at_least_one)]
    _file: str = PrivateAttr(default="")
    _handed_over: SecretStr | None = PrivateAttr(default=None)
    _store_handed_over: SecretStr | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _derived_names(cls, value: Any) -> Any:
        name, source = value.get("pipeline"), value.get("source")
        try:
            pipeline_name(name)
        except ValueError:
            return value
        if not isinstance(source, dict):
            return value
        return {**value, "source": {"publication": f"headwater_{name}", "slot": f"headwater_{name}", **source}}

    @property
    def file(self) -> str:
        """The absolute path of the file."""
        return self._file

    def read_from(self, file: str, environ: Mapping[str, str]) -> Self:
        """Remembers where the pipeline was read, and the connections that an operator handed over."""
        self._file = os.path.abspath(file)
        if conn_id := self.source.airflow_connection:
            handed_over = environ.get(connection_variable(conn_id))
            self._handed_over = SecretStr(handed_over) if handed_over else None
        if self.lake.airflow and (text := environ.get(store_variable(self.lake.airflow))):
            self._store_handed_over = SecretStr(text)
        return self

    def conninfo(self) -> str:
        """The libpq connection string: secret. Refused when an Airflow connection was not handed over."""
        conn_id = self.source.airflow_connection
        if conn_id is None:
            return self.source.connection_text.get_secret_value()
        variable = connection_variable(conn_id)
        text = self._handed_over.get_secret_value() if self._handed_over else os.environ.get(variable, "")
        if not text or not is_conninfo(text):
            fault = "holds no libpq connection string" if text else "is not set"
            raise Refused(
                f"the connection is the Airflow connection {conn_id}, but {variable} {fault}",
                code="bad_configuration",
                where=f"{self.file}: source.connection",
                remedy=f"run it by the pipeline's DAG, or set {variable} to a libpq connection string",
            )
        return text

    def hash_key(self) -> bytes:
        """The key of `columns.hash`, from the environment: secret. Refused when it is not there."""
        variable = self.source.hash_key
        key = os.environ.get(variable, "").encode() if variable else b""
        if len(key) >= _SHORTEST_HASH_KEY:
            return key
        fault = f"{variable} holds fewer than {_SHORTEST_HASH_KEY} bytes" if key else f"{variable} is not set"
        raise Refused(
            f"columns.hash needs a key, and {fault if variable else 'source.hash_key names none'}",
            code="hash_key",
            where=f"{self.file}: source.hash_key",
            remedy="write env: and a variable's name there, and set that variable to a secret that is kept for good "
            "(openssl rand -hex 32 makes one) wherever this pipeline is loaded, replicated and verified",
        )

    def with_file(self, remedy: str) -> str:
        """`remedy` as it can be typed here; see `headwater.errors.with_file`."""
        return with_file(remedy, self.file)

    def lake_path(self) -> str:
        """The lake's root: a path of this machine, or a place in an object store, which this process can enter then.
        Refused when the keys are an Airflow connection's, and it was not handed over; also when libraries would mix the
        keys that are given with others of the environment."""
        root = place_of(self.lake.root)
        if is_remote(root) and (conn_id := self.lake.airflow):
            text = self._store_handed_over.get_secret_value() if self._store_handed_over else ""
            where = f"{self.file}: lake.airflow"
            store_connections.enter(root, conn_id, self.lake.storage.options(), text, where)
        elif is_remote(root) and (profile := self.lake.storage.profile):
            where = f"{self.file}: lake.storage.profile"
            store_profiles.enter(root, profile, self.lake.storage.options(), where)
        elif is_remote(root):
            options = self.lake.storage.options()
            for name, _ in options.secrets[:1]:
                where = f"{self.file}: lake.storage.{name}"
                store_options.refuse_foreign_secrets(dict(options.secrets), "the pipeline file", where)
            store_options.register(root, options)
        return root

    def entry_for(self, table: TableName) -> TableEntry | None:
        """The entry that speaks of `table`; one that names it comes before patterns, then the first counts."""
        entries = [entry for entry in self.tables if entry.covers(table)]
        return min(entries, key=lambda entry: isinstance(entry.name, TablePattern), default=None)

    def freshness_of(self, table: TableName) -> float | None:
        """The greatest staleness in seconds that waits for `require: default` allow `table`; None: none, so now."""
        entry = self.entry_for(table)
        return entry.freshness if entry is not None and entry.freshness is not None else self.defaults.freshness

    def validated(self, table: TableName) -> bool:
        """Whether waits for `require: default` want `table` validated."""
        entry = self.entry_for(table)
        return entry.validated if entry is not None and entry.validated is not None else self.defaults.validated

    def on_schema_change_of(self, entry: TableEntry | None) -> str:
        return (entry.on_schema_change if entry is not None else None) or self.defaults.on_schema_change

    def on_divergence_of(self, entry: TableEntry | None) -> str:
        return (entry.on_divergence if entry is not None else None) or self.defaults.on_divergence


def load_pipeline(path: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> Pipeline:
    """The pipeline in the file at `path`; BadPipelineFile lists all that is wrong with it. Other errors as of
    `read_pipeline_file`."""
    file = os.fspath(path)
    return parse_pipeline(read_pipeline_file(file), file, os.environ if environ is None else environ)


def read_pipeline_file(file: str) -> bytes:
    """What it holds; BadConfiguration when there is nothing to be read at this path, and Transient when the folder it
    is in does not answer just now, as one on another machine may."""
    try:
        with open(file, "rb") as stream:
            return stream.read()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "not a usable path"
        said = f"the pipeline file cannot be read: {reason}"
        if isinstance(error, OSError) and error.errno not in _NO_SUCH_FILE:
            remedy = "try again; if it stays so, look after the disk or the network folder of the file"
            raise Transient(said, code="unreadable_file", where=file, remedy=remedy) from None
        raise BadConfiguration(said, where=file, remedy="name an existing YAML file") from None


def parse_pipeline(text: bytes, file: str, environ: Mapping[str, str]) -> Pipeline:
    """The same of what a file holds, or is going to hold."""
    document = yaml_file.parse(text, environ)
    pipeline: Pipeline | None = None
    if not isinstance(document.data, dict):
        if not document.problems:
            found = "it is empty" if document.data is None else f"found {document.shown(())}"
            document.report((), f"expected a mapping with the keys {_keys(Pipeline)}; {found}")
    else:
        try:
            pipeline = Pipeline.model_validate(document.data)
        except ValidationError as error:
            _report(document, error)
        _check_tables(document)
    if pipeline is None or document.problems:
        raise BadPipelineFile(file, tuple(sorted(document.problems, key=lambda problem: problem.line or 0)))
    return pipeline.read_from(file, environ)


def _check_tables(document: Document) -> None:
    """What concerns several keys or entries; beside pydantic, so that one kind of fault does not hide the other."""
    first: dict[TableName | TablePattern, Path] = {}
    tables = document.data.get("tables")
    for index, entry in enumerate(tables if isinstance(tables, list) else []):
        path: Path = ("tables", index)
        options = entry if isinstance(entry, dict) else {}
        try:
            name = table_value(options.get("name") if isinstance(entry, dict) else entry)
        except ValueError:
            continue
        if name in first:
            # By place, not by name: the name may have come from the environment.
            earlier = f"{yaml_file.format_path(first[name])}, line {document.line(first[name])}"
            document.report(path, f"{document.shown(_name_path(document, path))} is listed twice (first: {earlier})")
        first.setdefault(name, path)
        if isinstance(name, TablePattern):
            for key in ("key", "types", "partition_by", "cluster_by", "columns", "where"):
                if key in options:
                    document.report((*path, key), "not possible for a pattern; give the table an entry of its own")
            _check_exclude(document, name, (*path, "exclude"))
        if options.get("partition_by") and options.get("cluster_by"):
            document.report((*path, "cluster_by"), "not possible beside partition_by: Delta knows either")
        if isinstance(listed := options.get("cluster_by"), list) and len(listed) > MOST_CLUSTERED:
            document.report(
                (*path, "cluster_by"), f"names {len(listed)} columns; at most {MOST_CLUSTERED} are possible"
            )
        if all(options.get(key) in (True, "true") for key in ("insert_only", "soft_delete")):
            document.report((*path, "soft_delete"), "not possible beside insert_only: such rows are never deleted")
        for key in ("types", "on_bad_value"):
            _check_columns(document, options.get(key), (*path, key))
        if isinstance(columns := options.get("columns"), dict):
            _check_columns(document, columns.get("mask"), (*path, "columns", "mask"))
            _check_ways(document, columns | {"types": options.get("types")}, path)
        if isinstance(name, TableName) and "exclude" in options:
            document.report((*path, "exclude"), "possible only beside a pattern, a name with an unquoted *")


def _check_columns(document: Document, by_column: Any, path: Path) -> None:
    """Two spellings of one column are two keys to YAML."""
    seen: set[str] = set()
    for text in by_column if isinstance(by_column, dict) else {}:
        try:
            column = name_value(text)
        except ValueError:
            continue
        if column in seen:
            document.report((*path, text), "the same column is there twice")
        seen.add(column)


def _check_ways(document: Document, columns: dict[Any, Any], path: Path) -> None:
    """A column stays at the source, is hashed, is masked (both are text then), or has a type."""
    seen: dict[str, str] = {}
    for way in ("exclude", "hash", "mask", "types"):
        listed = columns.get(way)
        for text in listed if isinstance(listed, list | dict) else ():
            try:
                name = name_value(text)
            except ValueError:
                continue
            if seen.setdefault(name, way) != way:
                where = (*path, way) if way == "types" else (*path, "columns", way)
                document.report(where, f"names a column that columns.{seen[name]} names, too")


def _check_exclude(document: Document, pattern: TablePattern, path: Path) -> None:
    excluded = document.value(path)
    for index, text in enumerate(excluded if isinstance(excluded, list) else []):
        try:
            name = table_value(text)
        except ValueError:
            continue
        if isinstance(name, TableName) and not pattern.matches(name):
            document.report((*path, index), f"{document.shown((*path, index))} is not matched by the pattern anyway")


def _name_path(document: Document, path: Path) -> Path:
    return (*path, "name") if isinstance(document.value(path), dict) else path


def _report(document: Document, errors: ValidationError) -> None:
    """Each fault that pydantic found, in our words, without what follows from a missing variable."""
    for error in errors.errors(include_url=False, include_context=True, include_input=False):
        # Without pydantic's own steps: which form of a value it took, and that a mapping's key is meant.
        path: Path = tuple(s for i, s in enumerate(error["loc"]) if s != "[key]" and not _is_form(error["loc"], i))
        if any(path[: len(unresolved)] == unresolved for unresolved in document.unresolved):
            continue
        if error["type"] == "extra_forbidden":
            section = _section(path[:-1])
            document.report(path, f"unknown key; possible here: {_keys(section) if section else 'nothing'}")
            continue
        if error["type"] == "missing":
            document.report(path, "is missing")
            continue
        if isinstance(document.value(path[:2]), str) and path[:1] == ("tables",):
            path = path[:2]  # the short form of a table has no key `name`
        message = _message(error, path)
        secret = path[:2] in _SECRETS or path[:3] in _SECRETS or document.value(path) == document.value(())
        secret = secret or _PASSWORD.search(str(document.value(path))) is not None
        document.report(path, message if secret else f"{message}; got {document.shown(path)}")


def _is_form(path: Path, index: int) -> bool:
    return index > 0 and path[index - 1] == "on_bad_value" and path[index] in ("one", "by column") and index == 3


def _message(error: Any, path: Path) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return "expected one of: " + str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        section = _section(path)
        return f"expected a mapping with the keys {_keys(section)}" if section else "expected a mapping"
    if kind in ("tuple_type", "list_type"):
        return "expected a list"
    return str(error["msg"])


def _section(path: Path) -> type[_Section] | None:
    if not path:
        return Pipeline
    sections: dict[Path, type[_Section]] = {
        ("source",): Source,
        ("lake",): Lake,
        ("lake", "storage"): Storage,
        ("load",): Load,
        ("replicate",): Replicate,
        ("defaults",): Defaults,
    }
    if path[0] == "tables" and len(path) == 3 and path[2] == "columns":
        return Columns
    return TableEntry if path[0] == "tables" and len(path) == 2 else sections.get(path)


def _keys(section: type[_Section]) -> str:
    return ", ".join(field.alias or name for name, field in section.model_fields.items())
