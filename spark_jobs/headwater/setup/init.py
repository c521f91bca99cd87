"""`headwater init`: a first pipeline file from what the source holds, and the SQL that the source still needs.

Asks at a terminal for what the options leave open; changes nothing but the file that it writes, and that only when it
is new or `force` is given. Nothing at the source is changed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from psycopg import conninfo as libpq

from headwater.errors import Refused
from headwater.names import INSERTS_SUFFIX, TableName, TablePattern, parse_name_or_pattern
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline, parse_pipeline
from headwater.pipeline_file.values import LIBPQ_SECRETS, connection_value, pipeline_name, root_value
from headwater.setup.new_file import VARIABLE, Chosen, text_of
from headwater.setup.survey import RIGHTS, Surveyed, candidates, survey
from headwater.source.catalog.catalog import Judged, read_catalog
from headwater.source.connection import Connection, connect
from headwater.source.problems import refuse_errors
from headwater.source.publication.setup_sql import setup_sql
from headwater.source.settings import version_problems
from headwater.terminal.questions import Questions

_ROLE: Final = "headwater"
_SECRETS: Final = (*LIBPQ_SECRETS, "passfile")

Tables = tuple[TableName | TablePattern, ...]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the command line says; None or empty: ask, or take the default. `tables`: patterns and names."""

    file: str | None = None
    source: str | None = None
    lake: str | None = None
    name: str | None = None
    tables: Tables = ()
    exclude: Tables = ()
    role: str | None = None
    force: bool = False
    only_sql: bool = False


def init(wishes: Wishes, questions: Questions | None, learn: Callable[[str], None]) -> dict[str, Any]:
    """`{"file", "pipeline", "role", "source", "tables": {T: ...}, "sql"}`; with `only_sql` the SQL alone.

    `questions` None: nobody can be asked, and what is missing is Refused. `learn` is told every connection string.
    """
    if wishes.file is not None and os.path.exists(wishes.file):
        if wishes.only_sql:
            return _sql_of(wishes, wishes.file, learn)
        _refuse_to_overwrite(wishes.file, wishes)
    conninfo, connection = _connected(wishes, questions, learn)
    with closing(connection):
        name = _name(wishes, questions, connection.info.dbname)
        file = wishes.file or f"{name}.yaml"
        if not wishes.only_sql:
            _refuse_to_overwrite(file, wishes)
        root = _lake(wishes, questions)
        listed = candidates(connection)
        if not listed:
            raise Refused(
                f"the database {connection.info.dbname} has no table",
                code="nothing_to_replicate",
                where="source",
                remedy="create the tables first, or name another database in --source",
            )
        everything = {"pipeline": name, "source": {"connection": conninfo}, "lake": {"root": root}}
        probe = Pipeline.model_validate({**everything, "tables": [str(one.name) for one in listed]})
        found = survey(connection, listed, read_catalog(connection, probe))
        if questions is not None and not wishes.tables:
            questions.show({str(one.name): one.to_json() for one in found})
        entries, left_out = choose(found, _tables(wishes, questions), wishes.exclude)
        role = wishes.role or _role(connection)
        source = _for_the_role(conninfo, role)
        text = text_of(name, root, entries, left_out, shlex.quote(source))
        pipeline = parse_pipeline(text.encode(), file, {**os.environ, VARIABLE: conninfo})
        sql = setup_sql(connection, pipeline, _judged(connection, pipeline), role)
    if wishes.only_sql:
        return {"sql": sql}
    if questions is not None and not questions.confirm(f"Write {file}?"):
        raise Refused("nothing was written, as you wished", code="refused", where=file)
    _write(file, text, wishes)
    chosen = {str(table.name) for entry in entries for table in entry.tables}
    return {
        "file": os.path.abspath(file),
        "pipeline": name,
        "role": role,
        "source": source,
        "tables": {str(one.name): {"replicated": str(one.name) in chosen, **one.to_json()} for one in found},
        "sql": sql,
    }


def choose(found: Sequence[Surveyed], wanted: Tables, excluded: Tables) -> tuple[list[Chosen], list[Surveyed]]:
    """The entries of the file, and the tables that were wanted and cannot be replicated. No `wanted`: every table."""
    by_name = {one.name: one for one in found}
    # An exclusion, too: by a typing error a table would be replicated that was to stay out.
    for option, names in (("--table", wanted), ("--exclude", excluded)):
        missing = [str(name) for name in names if isinstance(name, TableName) and name not in by_name]
        if missing:
            raise Refused(
                f"{', '.join(missing)}: there is no such table in the source (a partition comes with its table)",
                code="table_missing",
                where=option,
                remedy="correct the name (names are SQL: quote upper case)",
            )

    def is_excluded(table: Surveyed) -> bool:
        return any(_matches(name, table) for name in excluded)

    kept = [one for one in found if not is_excluded(one)]
    entries: list[Chosen] = []
    left_out: dict[TableName, Surveyed] = {}
    for name in wanted or tuple(one.name for one in kept):
        meant = [one for one in kept if _matches(name, one)]
        possible = tuple(one for one in meant if not one.obstacles)
        impossible = [one for one in meant if one.obstacles]
        left_out.update({one.name: one for one in impossible})
        if not possible:
            continue
        out: Tables = ()
        if isinstance(name, TablePattern):
            by_hand = [one for one in excluded if isinstance(one, TablePattern) or name.matches(one)]
            out = tuple(dict.fromkeys([*by_hand, *(one.name for one in impossible)]))
        entries.append(Chosen(name, possible, out))
    if not entries:
        reasons = "".join(f"\n  {problem}" for table in left_out.values() for problem in table.obstacles)
        raise Refused(
            f"there is no table that can be replicated{':' if reasons else ''}{reasons}",
            code="nothing_to_replicate",
            where="source",
            remedy="name other tables, or do what is said above",
        )
    return entries, list(left_out.values())


def _matches(name: TableName | TablePattern, table: Surveyed) -> bool:
    return name == table.name if isinstance(name, TableName) else name.matches(table.name)


def _sql_of(wishes: Wishes, file: str, learn: Callable[[str], None]) -> dict[str, Any]:
    """For a file that is there: as it now says, column lists and row filters included."""
    environ: Mapping[str, str] = {**os.environ, **({VARIABLE: wishes.source} if wishes.source else {})}
    pipeline = load_pipeline(file, environ)
    learn(pipeline.conninfo())
    with closing(connect(pipeline.conninfo(), application_name="headwater init", statement_timeout=60.0)) as connection:
        refuse_errors(version_problems(connection))
        role = wishes.role or _role(connection)
        return {"sql": setup_sql(connection, pipeline, _judged(connection, pipeline), role)}


def _judged(connection: Connection, pipeline: Pipeline) -> list[Judged]:
    """The pipeline's tables. Refused where one cannot be replicated, rights aside: these are what the SQL gives."""
    catalog = read_catalog(connection, pipeline)
    refuse_errors(problem for problem in catalog.problems if problem.code not in RIGHTS)
    return list(catalog.judged)


def _connected(wishes: Wishes, questions: Questions | None, learn: Callable[[str], None]) -> tuple[str, Connection]:
    conninfo = wishes.source or os.environ.get(VARIABLE, "")
    if not conninfo:
        if questions is None:
            raise _missing("--source", f"or set {VARIABLE}")
        conninfo = questions.ask(
            "Source (a libpq URI such as postgresql://user@host:5432/database; leave the password out to be asked)",
            lambda text: str(connection_value(text).get_secret_value()),
        )
    learn(conninfo)
    try:
        connection = _open(conninfo)
    except Refused as refused:
        if questions is None or refused.code != "wrong_password":
            raise
        conninfo = libpq.make_conninfo(conninfo, password=questions.secret("Password"))
        learn(conninfo)
        connection = _open(conninfo)
    try:
        refuse_errors(version_problems(connection))
    except Refused:
        connection.close()
        raise
    return conninfo, connection


def _open(conninfo: str) -> Connection:
    return connect(conninfo, application_name="headwater init", statement_timeout=60.0)


def _name(wishes: Wishes, questions: Questions | None, database: str) -> str:
    plain = re.sub(r"[^a-z0-9_]", "_", database.lower())
    default = re.sub(r"\A[^a-z]+", "", plain)[:45].removesuffix(INSERTS_SUFFIX) or "pipeline"
    if wishes.name or questions is None:
        return wishes.name or default
    return questions.ask("Name of the pipeline", pipeline_name, default)


def _lake(wishes: Wishes, questions: Questions | None) -> str:
    if wishes.lake or wishes.only_sql:
        return wishes.lake or "file:///"  # of which the SQL says nothing
    if questions is None:
        raise _missing(
            "--lake",
            "a folder, as file:///data/lake or as an absolute path, or a place in a store, as s3://bucket/prefix",
        )
    return questions.ask(
        "Lake (file:/// and an absolute path, or s3://bucket/prefix)", root_value, f"file://{os.getcwd()}/lake"
    )


def _tables(wishes: Wishes, questions: Questions | None) -> Tables:
    if wishes.tables or questions is None:
        return wishes.tables
    return questions.ask("Tables, by name or pattern (public.orders, shop.*), separated by blanks; all", _parsed, "all")


def _parsed(text: str) -> Tables:
    return () if text == "all" else tuple(parse_name_or_pattern(part) for part in text.split())


def _role(connection: Connection) -> str:
    """Whom the pipeline is to work as: who is connected now, unless that one may do anything."""
    superuser = connection.info.parameter_status("is_superuser") == "on"
    return _ROLE if superuser else connection.info.user


def _for_the_role(conninfo: str, role: str) -> str:
    """The connection string as the pipeline will need it, without a password."""
    options = libpq.conninfo_to_dict(conninfo)
    for key in _SECRETS:
        options.pop(key, None)
    return libpq.make_conninfo("", **{**options, "user": role, "password": "..."})


def _missing(option: str, what: str) -> Refused:
    return Refused(
        f"{option} is missing",
        code="usage",
        where="headwater init",
        remedy=f"give {option} ({what}), or run it at a terminal without --yes",
    )


def _refuse_to_overwrite(file: str, wishes: Wishes) -> None:
    if os.path.lexists(file) and not wishes.force:
        raise Refused(
            "the file exists",
            code="file_exists",
            where=file,
            remedy="name another file, or overwrite it with --force; --sql prints the SQL that the source needs for it",
        )


def _write(file: str, text: str, wishes: Wishes) -> None:
    try:
        with open(file, "w" if wishes.force else "x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise Refused(
            f"it cannot be written: {error.strerror}", code="bad_configuration", where=file, remedy="name another file"
        ) from None
