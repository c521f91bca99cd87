"""What is expected of a table: the suite in a file beside the pipeline file, and the basics made from its schema.

A file is `expectations/<schema>.<table>.json` or `.yaml` in the pipeline file's folder, or the same in
`expectations/<pipeline>/` where several pipelines lie in one folder; names as folders of the lake are called. It holds
a suite in the form that Great Expectations writes. Here only its shape is judged, and whether the columns that it names
exist; what an expectation's type and arguments mean is for `headwater.validate.expectations` to say.

All that is wrong in all files is one refusal, made before anything runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from headwater.errors import Refused
from headwater.names import TableName
from headwater.pipeline_file import yaml as yaml_file
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.yaml import FileProblem
from headwater.schema import TableSchema

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""Rising. Only `error` fails a validation."""

BASICS = "basics"
FEWEST_ROWS = 100
"""Tables with fewer rows may grow and shrink as they like."""
DRIFT = 2
"""A table is expected to have at least 1/DRIFT and at most DRIFT times the rows of the validation before."""

_SEVERITY: dict[str, Severity] = {"critical": "error", "error": "error", "warning": "warning", "info": "info"}
_SUITE_KEYS = frozenset({"name", "expectations", "meta", "notes", "id", "suite_parameters"})
_EXPECTATION_KEYS = frozenset(
    {"type", "kwargs", "meta", "severity", "id", "notes", "description", "rendered_content", "expectation_context"}
)
_COLUMN_ARGUMENTS = ("column", "column_A", "column_B")
_SUFFIXES = (".json", ".yaml", ".yml")


class BadSuite(Refused):
    """Suite files that cannot be used; `message` lists every fault with its place."""

    default_code = "bad_suite"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One expectation. `kind` and `arguments` are Great Expectations' `type` and `kwargs`."""

    kind: str
    arguments: Mapping[str, Any]
    severity: Severity = "error"
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """The same for expectations that ask the same, whatever their severity."""
        text = json.dumps([self.kind, self.arguments], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it speaks of."""
        named = [self.arguments[name] for name in _COLUMN_ARGUMENTS if isinstance(self.arguments.get(name), str)]
        listed = self.arguments.get("column_list")
        return (*named, *(listed if isinstance(listed, list | tuple) else ()))


@dataclass(frozen=True, slots=True)
class Suite:
    """`name`: `basics`, or the one in the file. `where`: the file; empty for the basics."""

    name: str
    expectations: tuple[Expectation, ...]
    where: str = ""

    def place(self, index: int) -> str:
        return f"{self.where}: expectations[{index}]"


def basics(
    schema: TableSchema,
    *,
    classes: Mapping[str, str],
    rows_before: int | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Suite:
    """What every table is expected to be, from the schema that the registry has for it.

    `classes`: Spark's class of each column's type. `rows_before`: rows at the last validation that passed; None: there
    is none. `labels`: of columns that are enums, as far as the source was asked.
    """
    names = [column.name for column in schema.columns if can_be_named(column.name)]
    found = [
        Expectation("expect_column_values_to_be_of_type", {"column": name, "type_": classes[name]})
        for name in names
        if name in classes
    ]
    # A value that the lake could not hold was made NULL where the pipeline file says so, whatever the source forbids.
    filled = {c.name for c in schema.columns if c.not_null and c.on_bad_value != "null"} | set(schema.key)
    found += [Expectation("expect_column_values_to_not_be_null", {"column": n}) for n in names if n in filled]
    if len(schema.key) == 1 and schema.key[0] in names:
        found.append(Expectation("expect_column_values_to_be_unique", {"column": schema.key[0]}))
    elif schema.key and set(schema.key) <= set(names):
        found.append(Expectation("expect_compound_columns_to_be_unique", {"column_list": list(schema.key)}))
    found += [
        Expectation("expect_column_values_to_be_in_set", {"column": name, "value_set": list(values)}, "warning")
        for name, values in (labels or {}).items()
        if name in names
    ]
    if rows_before is not None and rows_before >= FEWEST_ROWS:
        bounds = {"min_value": rows_before // DRIFT, "max_value": rows_before * DRIFT}
        found.append(Expectation("expect_table_row_count_to_be_between", bounds, "warning"))
    return Suite(BASICS, tuple(found))


def can_be_named(column: str) -> bool:
    """Great Expectations takes a dot in a name for the way into a structure, and cannot quote a back tick."""
    return "." not in column and "`" not in column


def read_suites(pipeline: Pipeline, tables: Mapping[str, TableSchema]) -> dict[str, Suite]:
    """The suites of files, by table. `tables`: the schemas of all tables that are loaded.

    BadSuite when a file cannot be used, or belongs to no table.
    """
    suites: dict[str, Suite] = {}
    problems: list[str] = []
    for path in _files(pipeline):
        name = _table_of(path, [*tables, *_named(pipeline)])
        if name is None:
            problems.append(f"{path}: no table of the pipeline {pipeline.name} has its suite in a file of this name")
            continue
        if name in suites:
            problems.append(f"{path}: {name} has another suite file, {suites[name].where}")
            continue
        reading = _Reading(path, tables.get(name))
        suite = reading.suite()
        problems += [f"{path}: {problem}" for problem in reading.problems]
        if suite is not None:
            suites[name] = suite
    if problems:
        raise bad_suites(problems)
    return suites


def bad_suites(problems: Sequence[str]) -> BadSuite:
    return BadSuite(
        "\n  ".join(["the suite files cannot be used:", *problems]),
        remedy="correct the files (a suite is named expectations/<schema>.<table>.yaml or .json; where several "
        "pipelines lie in a folder, expectations/<pipeline>/<schema>.<table>.yaml); nothing was validated",
    )


def _files(pipeline: Pipeline) -> Iterator[Path]:
    folder = Path(pipeline.file).parent / "expectations"
    for place in (folder, folder / pipeline.name):
        # Not files that an editor or a file system leaves beside ours.
        found = place.iterdir() if place.is_dir() else ()
        yield from sorted(
            path for path in found if path.is_file() and not path.name.startswith(".") and _is_suite(path)
        )


def _is_suite(path: Path) -> bool:
    return path.suffix in _SUFFIXES


def _named(pipeline: Pipeline) -> list[str]:
    """Tables that the pipeline file names, loaded or not."""
    return [str(entry.name) for entry in pipeline.tables if isinstance(entry.name, TableName)]


def _table_of(path: Path, names: Sequence[str]) -> str | None:
    return next((name for name in names if TableName.parse(name).path.replace("/", ".") == path.stem), None)


class _Reading:
    """One file. `schema`: of its table; None: it is not loaded yet, so its columns are not known."""

    def __init__(self, path: Path, schema: TableSchema | None) -> None:
        self._path, self._schema = path, schema
        self.problems: list[FileProblem] = []

    def suite(self) -> Suite | None:
        data = self._parsed()
        if self.problems:
            return None
        if not isinstance(data, dict) or not isinstance(data.get("expectations"), list):
            self._report("", "expected a mapping with the list `expectations`")
            return None
        for key in sorted(set(map(str, data)) - _SUITE_KEYS):
            self._report(key, f"unknown key; possible: {', '.join(sorted(_SUITE_KEYS))}")
        name = data.get("name", self._path.stem)
        if not isinstance(name, str) or not name or name == BASICS:
            self._report("name", f"expected a name, other than {BASICS}")
            name = self._path.stem
        found = [self._expectation(f"expectations[{i}]", value) for i, value in enumerate(data["expectations"])]
        return Suite(name, tuple(one for one in found if one is not None), str(self._path))

    def _parsed(self) -> Any:
        try:
            content = self._path.read_bytes()
            if self._path.suffix == ".json":
                return json.loads(content)
        except OSError as error:
            self._report("", f"cannot be read: {error.strerror or error}")
            return None
        except json.JSONDecodeError as error:
            self.problems.append(FileProblem("", error.lineno, f"not valid JSON: {error.msg}"))
            return None
        except UnicodeDecodeError:
            self._report("", "not valid JSON: it holds bytes that are no UTF-8 text")
            return None
        document = yaml_file.parse(content, {})
        self.problems += document.problems
        return document.data

    def _expectation(self, place: str, value: Any) -> Expectation | None:
        before = len(self.problems)
        if not isinstance(value, dict):
            self._report(place, "expected a mapping with `type` and `kwargs`")
            return None
        for key in sorted(set(map(str, value)) - _EXPECTATION_KEYS):
            self._report(f"{place}.{key}", f"unknown key; possible: {', '.join(sorted(_EXPECTATION_KEYS))}")
        kind, arguments, meta = value.get("type"), value.get("kwargs", {}), value.get("meta") or {}
        if not isinstance(kind, str):
            self._report(
                f"{place}.type", "expected the name of an expectation, such as expect_column_values_to_be_unique"
            )
        if not isinstance(arguments, dict) or not isinstance(meta, dict):
            self._report(place, "expected mappings in `kwargs` and `meta`")
            return None
        said = str(meta.get("severity", value.get("severity") or "critical"))
        if said not in _SEVERITY:
            self._report(f"{place}.severity", f"{said!r}: expected error (or critical), warning or info")
        if "$PARAMETER" in json.dumps(arguments, default=str):
            self._report(f"{place}.kwargs", "suite parameters have no values here; write the value")
        if len(self.problems) > before:
            return None
        # The batch is the cut's: what a file says of one belongs to another run.
        kept = {name: value for name, value in arguments.items() if name != "batch_id"}
        found = Expectation(str(kind), kept, _SEVERITY[said], meta)
        self._check_columns(place, found)
        return found

    def _check_columns(self, place: str, found: Expectation) -> None:
        known = {column.name for column in self._schema.columns} if self._schema is not None else None
        for name in found.columns:
            if known is not None and name not in known:
                self._report(f"{place}.kwargs", f"the table has no column {name!r} in the lake")
            elif not can_be_named(name):
                self._report(
                    f"{place}.kwargs", f"Great Expectations cannot ask about {name!r}, for its dot or back tick"
                )

    def _report(self, path: str, message: str) -> None:
        self.problems.append(FileProblem(path, None, message))
