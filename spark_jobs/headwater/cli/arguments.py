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
        description="Keeps a Delta lake in step with a PostgreSQL database.",
        epilog="Exit status: 0 done, 1 failed (try again), 2 refused (a person must act), 3 not fresh in time, "
        "4 some tables are suspended, 5 verify found differences or a validation failed.",
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
    _add_init(bare("init", "write a pipeline file from what the source holds, and say what the source still needs"))
    check = command("check", "check configuration, source settings, rights and replica identities")
    text = "instead: print SQL for event triggers that say in the log what DDL does; --yes runs it as well"
    check.add_argument("--install-ddl-markers", action="store_true", help=text)
    check.add_argument("--yes", action="store_true", help="with --install-ddl-markers: run the SQL at the source")
    load = command("load", "load tables; loaded ones are skipped, unfinished loads go on", tables=each)
    load.add_argument("--again", action="store_true", help="load the named tables anew")
    new_source = "take this server for the source from now on (a promoted standby, a restored backup); every table is"
    new_source += " suspended until this has brought it in step"
    load.add_argument("--new-source", action="store_true", help=f"with --again: {new_source}")
    text = "replace a table, or a part of it, by what the source holds; replication goes on meanwhile"
    reload = command("reload", text, tables=each)
    text = "instead: find what may differ by the source's catalog (attached, detached, rewritten), compare, and repair"
    reload.add_argument("--changed", action="store_true", help=text)
    reload.add_argument("--propose", action="store_true", help="as --changed, but only say what may differ and why")
    text = "a partition, or a subtree of them, as SQL names it; repeatable (default: the whole table)"
    reload.add_argument("--partition", metavar="P", action="append", default=[], help=text)
    text = "only rows of this predicate over columns of key and partitions: comparisons, IN, BETWEEN, AND, OR, NOT"
    reload.add_argument("--where", metavar="PREDICATE", default="", help=text)
    text = "give a table the shape that the file names by now (partition_by, cluster_by, types); readers go on"
    command("rebuild", text, tables="the table, as SQL names it")
    replicate = command("replicate", "apply the source's log to the lake until stopped")
    replicate.add_argument("--until", metavar="now|LSN", type=_now_or_lsn, help="stop once all up to there is in")
    replicate.add_argument("--max-seconds", metavar="N", type=_seconds, help="stop after so long")
    text = "take the running replicate's place without a pause, as soon as everything is ready"
    replicate.add_argument("--take-over", action="store_true", help=text)
    text = "how much longer than --max-seconds to go on while nobody comes to take over"
    replicate.add_argument("--overtime", metavar="N", type=_seconds, default=0.0, help=text)
    wait = command("wait", "wait until tables are fresh enough and print the cut", tables=each)
    wait.add_argument(
        "--require",
        metavar="now|LSN|30s|TIME|default",
        type=_requirement,
        default="now",
        help="what to wait for: a position, a greatest staleness, everything committed before a time"
        " (2026-03-01T00:00:00Z), or what the file's `freshness` says (default: now)",
    )
    wait.add_argument("--timeout", metavar="60s", type=_seconds, default=60.0, help="how long (default: 60s)")
    wait.add_argument("--ignore-suspended", action="store_true", help="leave suspended tables out")
    text = "only a cut that has passed `headwater validate` will do; it is the one that is printed"
    wait.add_argument("--validated", action="store_true", help=text)
    text = "with one --table: only this partition of it, or subtree, as SQL names it; repeatable"
    wait.add_argument("--partition", metavar="P", action="append", default=[], help=text)
    waits = command("waits", "show how long sensors and other waits took, and how they ended")
    text = f"look back so far (default: 7d; {KEPT_DAYS} days are kept)"
    waits.add_argument("--last", metavar="7d", type=_seconds, default=7 * 86400.0, help=text)
    status = command("status", "say how the pipeline is, and of each table its state and how far it is behind")
    status.add_argument("--verbose", action="store_true", help="also positions, versions, the slot and the stages")
    text = "end with 3 if the pipeline is late, stopped or paused, with 4 if it is degraded: for scripts and probes"
    status.add_argument("--exit-code", action="store_true", help=text)
    top = command("top", "show the status live until Ctrl-C; with --json one object a line")
    top.add_argument("--every", metavar="2s", type=_seconds, default=2.0, help="how often (default: 2s)")
    top.add_argument("--verbose", action="store_true", help="also positions, versions, the slot and the stages")
    command("doctor", "explain what is wrong with a pipeline, how that is known and what to do; changes nothing")
    verify = command("verify", "compare source and lake row by row", tables=each)
    verify.add_argument("--repair", action="store_true", help="put the rows right that differ, in one commit a table")
    verify.add_argument("--new-source", action="store_true", help=f"with --repair: {new_source}")
    validate = command("validate", "run expectation suites on a consistent cut", tables=each)
    text = "the cut: a file with what `wait --json` printed, or the newest one (default: newest)"
    validate.add_argument("--cut", metavar="FILE|newest", default="newest", help=text)
    text = "look only at rows that came since the last validation, where that says the same"
    validate.add_argument("--incremental", action="store_true", help=text)
    text = "where to write the HTML pages (default: in the lake)"
    validate.add_argument("--pages", metavar="FOLDER", type=os.path.abspath, help=text)
    text = "how long a cut that has passed stays readable (default: 24h, or lake.keep_cuts if that is longer)"
    validate.add_argument("--keep", metavar="24h", type=_seconds, help=text)
    command("maintain", "compact files, write checkpoints, remove what no cut needs any more", tables=each)
    pausing = "single tables: their changes are not kept, resume loads them anew (default: the pipeline)"
    for name, text in (
        ("pause", "let no replicate run until resume; the source keeps its log"),
        ("resume", "end a pause"),
    ):
        command(name, text, tables=pausing)
    command("drop", "remove slot and publication at the source; the lake stays")
    # Only listed here: `main` hands its arguments over unread.
    commands.add_parser("demo", help="the whole way on an embedded PostgreSQL", add_help=False)
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
    text = "where the tables are, as libpq says it (default: HEADWATER_SOURCE); the file names only the variable"
    init.add_argument("--source", metavar="CONNINFO", type=_connection, help=text)
    init.add_argument(
        "--lake", metavar="ROOT", type=_root, help="where the lake will be: file:/// and an absolute path"
    )
    init.add_argument("--name", metavar="NAME", type=_pipeline_name, help="of the pipeline (default: the database's)")
    text = "a table or, with *, a pattern for several; repeatable (default: every table)"
    init.add_argument("--table", metavar="PATTERN", action="append", type=_name_or_pattern, default=[], help=text)
    text = "tables to leave out; repeatable"
    init.add_argument("--exclude", metavar="PATTERN", action="append", type=_name_or_pattern, default=[], help=text)
    text = "whom the pipeline works as (default: the connection's user; headwater, if that is a superuser)"
    init.add_argument("--role", metavar="R", help=text)
    text = "print only the SQL that the source needs, of the file as it is if it exists; write nothing"
    init.add_argument("--sql", action="store_true", help=text)
    init.add_argument("--force", action="store_true", help="write over a file that is there")
    init.add_argument("--yes", action="store_true", help="ask nothing")
    init.add_argument("--json", action="store_true", help="print one JSON object on stdout; asks nothing")


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
