"""The command line's grammar: commands, their options, and what each of these may be. Imports no job."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from headwater.errors import EXIT_REFUSED, Refused
from headwater.lake.wait_log import KEPT_DAYS
from headwater.names import TableName, TablePattern, parse_name_or_pattern
from headwater.pipeline_file.quantities import parse_duration
from headwater.position import parse_lsn

_T = TypeVar("_T")
EXAMPLES: Final = {
    "init": (
        "headwater init shop.yaml                                          # asks",
        "headwater init shop.yaml --lake file:///data/lake --table 'public.*' --yes",
        "headwater init shop.yaml --sql > for_the_dba.sql",
    ),
    "check": (
        "headwater check shop.yaml",
        "headwater check shop.yaml --install-ddl-markers > for_the_dba.sql",
    ),
    "load": (
        "headwater load shop.yaml",
        "headwater load shop.yaml --table public.orders --again",
    ),
    "reload": (
        "headwater reload shop.yaml --table public.orders --partition orders_2026_01",
        "headwater reload shop.yaml --table public.orders --where 'id between 5 and 9'",
        "headwater reload shop.yaml --changed",
    ),
    "rebuild": ("headwater rebuild shop.yaml --table public.orders",),
    "replicate": (
        "headwater replicate shop.yaml                                     # until SIGTERM or Ctrl-C",
        "headwater replicate shop.yaml --until now",
        "headwater replicate shop.yaml --max-seconds 10m --take-over",
    ),
    "wait": (
        "headwater wait shop.yaml --require now --json > cut.json",
        "headwater wait shop.yaml --table public.orders --require 30s --timeout 2m",
    ),
    "waits": ("headwater waits shop.yaml --last 24h",),
    "status": (
        "headwater status shop.yaml",
        "headwater status shop.yaml --exit-code > /dev/null || page_somebody",
        "headwater status shop.yaml --json | jq -r .health.sentence",
    ),
    "top": ("headwater top shop.yaml",),
    "doctor": ("headwater doctor shop.yaml",),
    "verify": ("headwater verify shop.yaml --table public.orders --repair",),
    "validate": ("headwater validate shop.yaml --cut cut.json --incremental",),
    "maintain": ("headwater maintain shop.yaml",),
    "pause": (
        "headwater pause shop.yaml",
        "headwater pause shop.yaml --table public.orders                   # the others go on",
    ),
    "resume": ("headwater resume shop.yaml",),
    "drop": ("headwater drop shop.yaml",),
}
"""Of each command, as its help shows them."""


def complete() -> None:
    """Answers a shell that wants to complete a command line, and ends the process; returns if none does."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What `arguments` ask for; SystemExit where they cannot be understood or ask for help, and where there are none:
    then with all help that there is."""
    _Parser.as_json = "--json" in arguments
    made = parser()
    if not arguments:
        made.print_help(sys.stderr)
        raise SystemExit(EXIT_REFUSED)
    return made.parse_args(arguments)


class _Parser(argparse.ArgumentParser):
    """Usage errors are refusals like any other: a sentence on stderr, with --json the error object on stdout."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if _Parser.as_json:
            print(json.dumps(Refused(message, code="usage", remedy=f"{self.prog} --help").to_json()))
        self.exit(EXIT_REFUSED, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    made = _Parser(
        prog="headwater",
        allow_abbrev=False,
        description="Replicates a PostgreSQL database into a Delta lake, and tells when the lake is fresh.",
        epilog="Exit status: 0 done, 1 failed (try again), 2 refused (a person must act), 3 not fresh in time (status "
        "--exit-code: late, stopped or paused), 4 some tables are suspended or were left out (status --exit-code: "
        "degraded), 5 verify found differences, a validation failed, or reload --changed left something as it is.",
    )
    made.add_argument("--version", action="version", version=f"headwater {_version()}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def bare(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="\n  ".join(["examples:", *EXAMPLES[name]]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def command(name: str, text: str, *, tables: str = "") -> argparse.ArgumentParser:
        sub = bare(name, text)
        _completed(sub.add_argument("pipeline", metavar="PIPELINE.yaml", help="the pipeline file"), _yaml_files)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        if tables:
            option = sub.add_argument("--table", metavar="T", action="append", type=_table, default=[], help=tables)
            _completed(option, _tables_in_file)
        return sub

    each = "a table, as SQL names it; repeatable (default: every table)"
    _add_init(
        bare("init", "write a pipeline file for the tables of a source, and print the SQL that the source still needs")
    )
    check = command("check", "check configuration, source settings, rights and replica identities")
    text = "instead: print SQL for event triggers that record DDL in the log; with --yes also run it"
    check.add_argument("--install-ddl-markers", action="store_true", help=text)
    check.add_argument("--yes", action="store_true", help="with --install-ddl-markers: run the SQL at the source")
    load = command("load", "load tables; skips loaded tables, continues unfinished loads", tables=each)
    load.add_argument("--again", action="store_true", help="load the named tables again, also if they are loaded")
    new_source = "this server is the source from now on (a promoted standby, a restored backup); every table is"
    new_source += " suspended until this command has finished with it"
    load.add_argument("--new-source", action="store_true", help=f"with --again: {new_source}")
    text = "read a table, or a part of it, from the source again; replication goes on meanwhile"
    reload = command("reload", text, tables=each)
    text = (
        "instead: find in the source's catalog what may differ (attached, detached, rewritten), compare it, repair it"
    )
    reload.add_argument("--changed", action="store_true", help=text)
    reload.add_argument("--propose", action="store_true", help="as --changed, but only print what may differ and why")
    text = "a partition, or a subtree of them, as SQL names it; repeatable (default: the whole table)"
    reload.add_argument("--partition", metavar="P", action="append", default=[], help=text)
    text = "only the rows of this predicate on key or partition columns: comparisons, IN, BETWEEN, AND, OR, NOT"
    reload.add_argument("--where", metavar="PREDICATE", default="", help=text)
    text = "rewrite a table in the layout of the pipeline file (partition_by, cluster_by, types); readers go on"
    command("rebuild", text, tables="the table, as SQL names it")
    replicate = command("replicate", "apply the source's log to the lake until stopped")
    replicate.add_argument("--until", metavar="now|LSN", type=_now_or_lsn, help="stop at this position")
    replicate.add_argument("--max-seconds", metavar="N", type=_seconds, help="maximum run time in seconds, or 10m")
    text = "replace the running replicate without a pause, as soon as this one is ready"
    replicate.add_argument("--take-over", action="store_true", help=text)
    text = "extra run time after --max-seconds while no other replicate takes over"
    replicate.add_argument("--overtime", metavar="N", type=_seconds, default=0.0, help=text)
    wait = command(
        "wait", "wait until tables are fresh enough, and print the cut: the table versions to read", tables=each
    )
    wait.add_argument(
        "--require",
        metavar="now|LSN|30s|TIME|default",
        type=_requirement,
        default="now",
        help="what to wait for: everything committed before now, a position, data at most 30s old, everything"
        " committed before a time (2026-03-01T00:00:00Z), or the file's `freshness` (default: now)",
    )
    wait.add_argument(
        "--timeout", metavar="60s", type=_seconds, default=60.0, help="maximum time to wait (default: 60s)"
    )
    wait.add_argument("--ignore-suspended", action="store_true", help="do not wait for suspended tables")
    text = "accept and print only a cut that has passed `headwater validate`"
    wait.add_argument("--validated", action="store_true", help=text)
    text = "with one --table: only this partition of it, or subtree, as SQL names it; repeatable"
    wait.add_argument("--partition", metavar="P", action="append", default=[], help=text)
    waits = command("waits", "show how long sensors and other waits took, and how they ended")
    text = f"time window (default: 7d; {KEPT_DAYS} days are kept)"
    waits.add_argument("--last", metavar="7d", type=_seconds, default=7 * 86400.0, help=text)
    status = command("status", "show the pipeline's health, and each table's state and lag")
    status.add_argument("--verbose", action="store_true", help="also positions, versions, the slot and the stages")
    text = "end with 3 if the pipeline is late, stopped or paused, with 4 if it is degraded: for scripts and probes"
    status.add_argument("--exit-code", action="store_true", help=text)
    top = command("top", "show the status live until Ctrl-C; with --json one object a line")
    top.add_argument("--every", metavar="2s", type=_seconds, default=2.0, help="how often (default: 2s)")
    top.add_argument("--verbose", action="store_true", help="also positions, versions, the slot and the stages")
    command("doctor", "explain what is wrong with a pipeline, with evidence and a cure; changes nothing")
    verify = command("verify", "compare source and lake row by row", tables=each)
    verify.add_argument("--repair", action="store_true", help="correct the rows that differ, in one commit a table")
    verify.add_argument("--new-source", action="store_true", help=f"with --repair: {new_source}")
    validate = command("validate", "run expectation suites on a cut", tables=each)
    text = "a file with the output of `wait --json`, or newest (default: newest)"
    validate.add_argument("--cut", metavar="FILE|newest", default="newest", help=text)
    text = "validate only rows that are new since the last validation, where the result is the same"
    validate.add_argument("--incremental", action="store_true", help=text)
    text = "where to write the HTML pages (default: in the lake)"
    validate.add_argument("--pages", metavar="FOLDER", type=os.path.abspath, help=text)
    text = "how long a cut that passed stays readable (default: 24h, or lake.keep_cuts if that is longer)"
    validate.add_argument("--keep", metavar="24h", type=_seconds, help=text)
    command("maintain", "compact files, write checkpoints, remove files that no cut needs", tables=each)
    pausing = "only these tables: their changes are not kept, resume loads them again (default: the pipeline)"
    for name, text in (
        ("pause", "stop replication until resume; the source keeps its log meanwhile"),
        ("resume", "end a pause"),
    ):
        command(name, text, tables=pausing)
    command("drop", "remove the slot and the publication at the source; the lake stays")
    # Only listed here: `main` hands its arguments over unread.
    commands.add_parser("demo", help="try everything on an embedded PostgreSQL", add_help=False)
    return made


def _version() -> str:
    from importlib.metadata import version

    return version("headwater")


def _completed(option: argparse.Action, by: Callable[..., Iterable[str]]) -> None:
    """Tells argcomplete how to complete the values of `option`."""
    option.completer = by  # type: ignore[attr-defined]


def _yaml_files(prefix: str, **known: Any) -> Iterable[str]:
    from argcomplete.completers import FilesCompleter

    return FilesCompleter(("yaml", "yml"))(prefix, **known)


def _tables_in_file(parsed_args: argparse.Namespace, **known: Any) -> list[str]:
    """The tables that the pipeline file names, also where its environment is not set."""
    import yaml

    try:
        with open(parsed_args.pipeline, encoding="utf-8") as stream:
            entries = yaml.safe_load(stream)["tables"]
        return [entry["name"] if isinstance(entry, dict) else str(entry) for entry in entries]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return []  # no file was named yet, or it is none


def _add_init(init: argparse.ArgumentParser) -> None:
    text = "the file to write (default: NAME.yaml)"
    _completed(init.add_argument("pipeline", metavar="PIPELINE.yaml", nargs="?", help=text), _yaml_files)
    text = "connection string (libpq) of the source (default: HEADWATER_SOURCE); the file names only the variable"
    init.add_argument("--source", metavar="CONNINFO", type=_connection, help=text)
    init.add_argument(
        "--lake",
        metavar="ROOT",
        type=_root,
        help="location of the lake: file:/// and an absolute path, or s3://, abfss://, gs://",
    )
    init.add_argument(
        "--name", metavar="NAME", type=_pipeline_name, help="name of the pipeline (default: the database's)"
    )
    text = "a table or, with *, a pattern for several; repeatable (default: every table)"
    init.add_argument("--table", metavar="PATTERN", action="append", type=_name_or_pattern, default=[], help=text)
    text = "tables to leave out; repeatable"
    init.add_argument("--exclude", metavar="PATTERN", action="append", type=_name_or_pattern, default=[], help=text)
    text = "database role to use (default: the connection's user; headwater, if that is a superuser)"
    init.add_argument("--role", metavar="R", help=text)
    text = "only print the SQL that the source needs (for an existing file as it is); write nothing"
    init.add_argument("--sql", action="store_true", help=text)
    init.add_argument("--force", action="store_true", help="overwrite an existing file")
    init.add_argument("--yes", action="store_true", help="do not prompt")
    init.add_argument("--json", action="store_true", help="print one JSON object on stdout; do not prompt")


def _connection(text: str) -> str:
    from headwater.pipeline_file.values import is_conninfo

    if not is_conninfo(text):  # it is a secret, and not repeated
        raise argparse.ArgumentTypeError("neither a libpq URI (postgresql://user@host:port/database) nor key=value")
    return text


def _root(text: str) -> str:
    from headwater.pipeline_file.values import root_value

    return _reasoned(root_value, text)


def _pipeline_name(text: str) -> str:
    from headwater.pipeline_file.values import pipeline_name

    return _reasoned(pipeline_name, text)


def _reasoned(read: Callable[[str], _T], text: str) -> _T:
    """argparse shows the reason of its own errors only."""
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _name_or_pattern(text: str) -> TableName | TablePattern:
    return _reasoned(parse_name_or_pattern, text)


def _table(text: str) -> TableName:
    return _reasoned(lambda name: TableName.parse(name, default_schema="public"), text)


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None


def _now_or_lsn(text: str) -> str:
    if text != "now":
        try:
            parse_lsn(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error}, or now") from None
    return text


def _requirement(text: str) -> str:
    from headwater.lake.requirements import parse_requirement

    try:
        parse_requirement(text)
    except Refused as refused:
        raise argparse.ArgumentTypeError(f"{refused.message}: {refused.remedy}") from None
    return text
