"""The commands: what was parsed, to the job that does it, and from its result to the exit status.

A job is imported only when it runs, so that `check`, `wait`, `status` and `drop` start without Spark, pandas or Arrow.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TextIO

from headwater.errors import (
    EXIT_DIFFERENCES,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOT_FRESH,
    EXIT_REFUSED,
    EXIT_SUSPENDED,
    Refused,
)
from headwater.names import BadName, TableName
from headwater.terminal.bars import load_display, say

if TYPE_CHECKING:
    from headwater.pipeline_file.pipeline import Pipeline

_PATIENCE = 3.0  # seconds for the source's first answer: a first screen without it would say that it is away
_USES_ARROW = frozenset({"wait", "waits", "status", "doctor", "top", "load", "reload", "replicate", "maintain"})
"""What reads or writes Delta tables, and never needs pandas."""
Result = tuple[dict[str, Any], int]
"""What a command gives: its JSON object and its exit status."""


def run(args: argparse.Namespace, stop: threading.Event, learn: Callable[[str], None], out: TextIO) -> Result | None:
    """Run the command that `args` names. `stop` asks replicate and top for their end; `learn` is told each connection
    string before it is used. None: the command has written to `out` by itself."""
    from headwater.pipeline_file.pipeline import load_pipeline

    if args.command == "init":
        return _init(args, learn)
    pipeline = load_pipeline(args.pipeline)
    learn(pipeline.conninfo())
    if args.command in _USES_ARROW:
        from headwater.no_pandas import keep_pandas_out

        keep_pandas_out()
    try:
        if args.command == "top":
            _top(pipeline, args, stop, out)
            return None
        return _COMMANDS[args.command](pipeline, args, stop)
    except OSError as error:
        from headwater.gate.check import not_permitted

        if (refused := not_permitted(pipeline.lake_path(), error)) is None:
            raise
        raise refused from error


def _init(args: argparse.Namespace, learn: Callable[[str], None]) -> Result:
    from headwater.setup.init import Wishes, init

    questions = None
    if not (args.yes or args.json or args.sql) and sys.stdin.isatty() and sys.stderr.isatty():
        from headwater.terminal.questions import Questions

        questions = Questions()
    wishes = Wishes(
        file=args.pipeline,
        source=args.source,
        lake=args.lake,
        name=args.name,
        tables=tuple(args.table),
        exclude=tuple(args.exclude),
        role=args.role,
        force=args.force,
        only_sql=args.sql,
    )
    return init(wishes, questions, learn), EXIT_DONE


def _check(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.gate.check import check

    if args.install_ddl_markers:
        from headwater.source.publication.ddl_markers import ddl_markers

        return ddl_markers(pipeline, told=args.yes), EXIT_DONE
    if args.yes:
        raise _usage("--yes belongs to --install-ddl-markers", "check")
    report = check(pipeline)
    found = report.to_json()
    for problem in found["problems"]:
        problem["remedy"] = pipeline.with_file(problem["remedy"])
    return found, EXIT_DONE if report.ok else EXIT_REFUSED


def _load(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.load.load import load

    if args.new_source:
        if not args.again:
            raise _usage(
                "--new-source goes with --again: nothing that the lake holds is known to be the source's", "load"
            )
        _refuse_some(tables, "load")
        from headwater.replicate.takeover.new_source import adopt

        adopt(pipeline)
    with load_display() as (tell, show):
        result = load(pipeline, tables, args.again, tell, show=show)
    return result, _unless_suspended(result)


def _reload(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    if args.changed or args.propose:
        if args.partition or args.where:
            raise _usage("--changed finds by itself what to reload", "reload")
        from headwater.verify.changed import reload_changed

        result = reload_changed(pipeline, tables, say, propose=args.propose)
        if any(table.get("not_repaired") or table.get("unsettled") for table in result["tables"].values()):
            return result, EXIT_DIFFERENCES
        compared = args.propose or all(table.get("compared", True) for table in result["tables"].values())
        return result, EXIT_DONE if compared else EXIT_SUSPENDED
    if len(tables) != 1:
        raise _usage("name one table, or say --changed", "reload")
    if args.partition and args.where:
        raise _usage("--partition and --where exclude each other: a predicate may name partition columns", "reload")
    partitions = [_partition(name, tables[0]) for name in args.partition]
    from headwater.reload.reload import reload

    with load_display() as (tell, show):
        result = reload(pipeline, tables[0], partitions, args.where, tell, show)
    return result, _unless_suspended(result)


def _rebuild(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    if len(tables) != 1:
        raise _usage("name one table", "rebuild")
    from headwater.reload.rebuild import rebuild

    with load_display() as (tell, show):
        result = rebuild(pipeline, tables[0], tell, show)
    return result, _unless_suspended(result)


def _usage(message: str, command: str) -> Refused:
    return Refused(message, code="usage", where=f"headwater {command}", remedy=f"headwater {command} --help")


def _replicate(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.verify.slot_loss import replicate_through_losses

    if args.overtime and args.max_seconds is None:
        raise _usage("--overtime goes with --max-seconds", "replicate")
    result = replicate_through_losses(pipeline, args.until, args.max_seconds, stop, args.take_over, args.overtime)
    for name, table in result["tables"].items():
        if table["state"] == "suspended":
            say(f"{name} is suspended: {table['reason']}. What to do: {pipeline.with_file(table['remedy'])}")
    return result, _unless_suspended(result)


def _wait(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.waiting.wait import requested_here, wait

    if args.partition and len(args.table) != 1:
        raise _usage("--partition goes with one --table", "wait")
    partitions = {table: [_partition(name, table) for name in args.partition] for table in args.table if args.partition}
    asked = requested_here(pipeline, args.require, args.timeout, args.table)
    request = replace(asked, partitions=partitions, ignore_suspended=args.ignore_suspended, validated=args.validated)
    result = wait(pipeline, request)
    return result.to_json(), result.exit_status


def _waits(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.lake.cuts import time_text
    from headwater.lake.wait_log import waits_since

    try:
        since = datetime.now(UTC) - timedelta(seconds=args.last)
    except OverflowError:
        raise _usage("--last reaches back further than a date can", "waits") from None
    found = [waits.to_json() for waits in waits_since(pipeline.lake_path(), since)]
    return {"pipeline": pipeline.name, "since": time_text(since), "waits": found}, EXIT_DONE


def _status(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.monitor.status import status

    result = status(pipeline)
    return result, _status_of(result, args.exit_code)


def _status_of(result: dict[str, Any], by_health: bool) -> int:
    """4 where a table is suspended; else 0, or what the health says."""
    if by_health and (level := result["health"]["level"]) != "ok":
        suspended = _unless_suspended(result)
        return suspended or (EXIT_SUSPENDED if level == "degraded" else EXIT_NOT_FRESH)
    return _unless_suspended(result)


def _top(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event, out: TextIO) -> None:
    """Show the status until `stop`: on a terminal in its place, else one after the other, with --json one a line."""
    from headwater.monitor.overview import PipelineWatch
    from headwater.terminal.live import live

    watch = PipelineWatch(pipeline, patience=_PATIENCE)

    def look() -> dict[str, Any]:
        return {**watch.overview(), "tables": {row["table"]: row for row in watch.table_rows()}}

    live(look, out, stop, every=args.every, as_json=args.json, verbose=args.verbose)


def _doctor(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.monitor.doctor import doctor

    return doctor(pipeline)


def _refuse_some(tables: Sequence[TableName], command: str) -> None:
    if tables:
        raise _usage("--new-source is for all tables: no other one could be brought in step by itself", command)


def _verify(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.verify.verify import verify

    if args.new_source and not args.repair:
        raise _usage("--new-source goes with --repair: no table is in step with a new source until then", "verify")
    if args.new_source:
        _refuse_some(tables, "verify")
    result = verify(pipeline, tables, args.repair, new_source=args.new_source)
    kinds = ("missing", "extra", "different")
    for table in result["tables"].values():
        # Keys that nobody has looked at are not known to be equal, whatever was repaired beside them.
        if table.get("more") or (any(table[kind] for kind in kinds) and not table["repaired"]):
            return result, EXIT_DIFFERENCES
    # A table that could not be compared is no clean bill of health.
    return result, EXIT_DONE if all(t.get("compared", True) for t in result["tables"].values()) else EXIT_SUSPENDED


def _validate(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    cut = None if args.cut == "newest" else _cut_in(args.cut)
    from headwater.validate.validate import validate

    result = validate(
        pipeline,
        tables,
        cut=cut,
        incremental=args.incremental,
        pages=args.pages,
        keep=args.keep,
        progress=say,
    )
    if not result["success"]:
        return result, EXIT_DIFFERENCES
    left_out = any(table["success"] is None for table in result["tables"].values())
    return result, EXIT_SUSPENDED if left_out else EXIT_DONE


def _cut_in(file: str) -> Any:
    """The JSON in `file`; whether it is a cut, the job says."""
    try:
        with open(file, encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, ValueError) as error:
        raise Refused(
            f"there is no cut in it: {getattr(error, 'strerror', None) or error}",
            code="bad_cut",
            where=f"--cut {file}",
            remedy="give the file into which `headwater wait --json` wrote its cut, or newest",
        ) from None


def _maintain(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.maintain.maintain import maintain

    result = maintain(pipeline, tables, say)
    failed = any(table["error"] for table in result["tables"].values())
    return result, EXIT_FAILED if failed else EXIT_DONE


def _pause(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.replicate.pausing import pause

    return pause(pipeline, _known_tables(pipeline, args.table)), EXIT_DONE


def _resume(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.replicate.pausing import resume

    result = resume(pipeline, tables, say)
    return result, _unless_suspended(result)


def _drop(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.setup.drop import drop

    return drop(pipeline), EXIT_DONE


def _unless_suspended(result: dict[str, Any]) -> int:
    suspended = any(table.get("state") == "suspended" for table in result["tables"].values())
    return EXIT_SUSPENDED if suspended else EXIT_DONE


def _known_tables(pipeline: Pipeline, tables: list[TableName]) -> list[TableName]:
    unknown = [str(table) for table in tables if pipeline.entry_for(table) is None]
    if unknown:
        raise Refused(
            f"{', '.join(unknown)}: not among the tables of the pipeline",
            code="not_replicated",
            where=pipeline.file,
            remedy="name a table of the pipeline file, or add it there",
        )
    return tables


def _partition(text: str, table: TableName) -> TableName:
    try:
        return TableName.parse(text, default_schema=table.schema)
    except BadName as error:
        raise Refused(str(error), code="usage", where="--partition", remedy="write it as SQL does") from None


_COMMANDS: dict[str, Callable[[Pipeline, argparse.Namespace, threading.Event], Result]] = {
    "check": _check,
    "load": _load,
    "reload": _reload,
    "rebuild": _rebuild,
    "replicate": _replicate,
    "wait": _wait,
    "waits": _waits,
    "status": _status,
    "doctor": _doctor,
    "verify": _verify,
    "validate": _validate,
    "maintain": _maintain,
    "pause": _pause,
    "resume": _resume,
    "drop": _drop,
}
