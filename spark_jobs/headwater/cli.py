"""The command line: arguments to jobs, results to JSON or tables, errors to one sentence and an exit status.

Thin: a command's work is in `headwater.jobs`, imported only when it runs, so that `--help`, `check`, `wait`, `status`
and `drop` start without Spark, pandas or Arrow. stdout carries the result alone, all else goes to stderr.
No password leaves this module: what is printed about an error has the pipeline's own taken out.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from headwater.errors import (
    EXIT_DIFFERENCES,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOT_FRESH,
    EXIT_REFUSED,
    EXIT_SUSPENDED,
    HeadwaterError,
    Refused,
    SourceUnreachable,
)
from headwater.names import BadName, TableName
from headwater.position import parse_lsn
from headwater.quantities import parse_duration
from headwater.secrets_filter import Scrubber, ScrubbingFormatter

if TYPE_CHECKING:
    from headwater.config import Pipeline

Result = tuple[dict[str, Any], int]
"""What a command gives: its JSON object and its exit status."""


class _Stopped(BaseException):
    """A signal ended a command that has nothing to finish. No Exception: nothing may take it for a failure."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_status = 128 + signal_number


class _Parser(argparse.ArgumentParser):
    """Usage errors are refusals like any other: a sentence on stderr, with --json the error object on stdout."""

    as_json = False

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        if _Parser.as_json:
            print(json.dumps(Refused(message, code="usage", remedy=f"{self.prog} --help").to_json()))
        self.exit(EXIT_REFUSED, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    stop = threading.Event()
    scrubber = Scrubber()
    _Parser.as_json = "--json" in arguments
    try:
        with _signals(stop, clean="replicate" in arguments[:1]):
            if arguments[:1] == ["demo"]:
                from headwater.jobs.demo import main as demo

                return int(demo(arguments[1:]))
            args = _parser().parse_args(arguments)
            _log_to_stderr(scrubber)
            with _result_stream(args.json) as out:
                return _run(args, stop, scrubber, out)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_DONE if end.code is None else EXIT_FAILED
    except _Stopped as stopped:
        return stopped.exit_status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output went away; Python must not complain about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except Exception as error:
        return _report(error, None, scrubber, sys.stdout)


def _run(args: argparse.Namespace, stop: threading.Event, scrubber: Scrubber, out: TextIO) -> int:
    try:
        from headwater.config import load_pipeline

        pipeline = load_pipeline(args.pipeline)
        scrubber.learn(pipeline.conninfo())
        result, exit_status = args.run(pipeline, args, stop)
    except BrokenPipeError:
        raise
    except Exception as error:
        return _report(error, args, scrubber, out)
    if args.json:
        print(json.dumps(result), file=out, flush=True)
    else:
        from headwater.render import render

        render(args.command, result, out)
    return int(exit_status)


def _report(error: Exception, args: argparse.Namespace | None, scrubber: Scrubber, out: TextIO) -> int:
    """Says what went wrong, on stderr and with --json on stdout; the exit status."""
    if os.environ.get("HEADWATER_DEBUG") == "1":
        print(scrubber.scrub("".join(traceback.format_exception(error))), file=sys.stderr)
    if isinstance(error, HeadwaterError):
        known, exit_status, sentence = error, error.exit_status, str(error)
    else:
        known = HeadwaterError(
            f"{type(error).__name__}: {error}", code="unexpected", remedy="HEADWATER_DEBUG=1 shows where it happened"
        )
        exit_status, sentence = EXIT_FAILED, str(known)
    command = args.command if args else ""
    if command == "wait" and isinstance(error, SourceUnreachable):
        exit_status = EXIT_NOT_FRESH
    if args and args.json:
        body: dict[str, Any] = known.to_json()
        if command == "check":
            body = {"ok": False, "problems": _as_problems(known), **body}
        print(json.dumps(scrubber.scrub_all(body)), file=out, flush=True)
    print(scrubber.scrub(f"headwater {command}: {sentence}".replace(" :", ":")), file=sys.stderr)
    return exit_status


def _as_problems(error: HeadwaterError) -> list[dict[str, Any]]:
    """`check` lists its problems whatever they are; a bad pipeline file has one for each fault."""
    body = {"code": error.code, "severity": "error", "remedy": error.remedy}
    faults = getattr(error, "problems", None)
    if not faults:
        return [{**body, "where": error.where, "message": error.message}]
    return [
        {**body, "where": f"{error.where}:{fault.line or 1}", "message": f"{fault.path}: {fault.message}"}
        for fault in faults
    ]


def _check(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.jobs.check import check

    report = check(pipeline)
    return report.to_json(), EXIT_DONE if report.ok else EXIT_REFUSED


def _load(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.jobs.load import load

    result = load(pipeline, tables, args.again, _say)
    return result, _unless_suspended(result)


def _reload(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    if args.changed or args.propose:
        if args.partition:
            raise _usage("--changed finds the partitions by itself", "reload")
        from headwater.jobs.changed import reload_changed

        result = reload_changed(pipeline, tables, _say, propose=args.propose)
        if any(table.get("not_repaired") or table.get("unsettled") for table in result["tables"].values()):
            return result, EXIT_DIFFERENCES
        compared = args.propose or all(table.get("compared", True) for table in result["tables"].values())
        return result, EXIT_DONE if compared else EXIT_SUSPENDED
    if len(tables) != 1:
        raise _usage("name one table, or say --changed", "reload")
    partitions = [_partition(name, tables[0]) for name in args.partition]
    from headwater.jobs.reload import reload

    result = reload(pipeline, tables[0], partitions, _say)
    return result, _unless_suspended(result)


def _usage(message: str, command: str) -> Refused:
    return Refused(message, code="usage", where=f"headwater {command}", remedy=f"headwater {command} --help")


def _replicate(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.jobs.replicate import replicate

    result = replicate(pipeline, args.until, args.max_seconds, stop, args.take_over)
    return result, _unless_suspended(result)


def _wait(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.jobs.wait import wait

    result = wait(pipeline, args.table, args.require, args.timeout, args.ignore_suspended, validated=args.validated)
    return result.to_json(), result.exit_status


def _status(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.jobs.status import status

    result = status(pipeline)
    return result, _unless_suspended(result)


def _verify(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.jobs.verify import verify

    result = verify(pipeline, tables, args.repair)
    kinds = ("missing", "extra", "different")
    if any(any(table[kind] for kind in kinds) and not table["repaired"] for table in result["tables"].values()):
        return result, EXIT_DIFFERENCES
    # A table that could not be compared is no clean bill of health.
    return result, EXIT_DONE if all(t.get("compared", True) for t in result["tables"].values()) else EXIT_SUSPENDED


def _validate(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    cut = None if args.cut == "newest" else _cut_in(args.cut)
    from headwater.jobs.validate import validate

    result = validate(
        pipeline,
        tables,
        cut=cut,
        incremental=args.incremental,
        pages=args.pages,
        keep=args.keep,
        progress=_say,
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
    from headwater.jobs.maintain import maintain

    result = maintain(pipeline, tables, _say)
    failed = any(table["error"] for table in result["tables"].values())
    return result, EXIT_FAILED if failed else EXIT_DONE


def _pause(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.jobs.pausing import pause

    return pause(pipeline, _known_tables(pipeline, args.table)), EXIT_DONE


def _resume(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    tables = _known_tables(pipeline, args.table)
    from headwater.jobs.pausing import resume

    result = resume(pipeline, tables, _say)
    return result, _unless_suspended(result)


def _drop(pipeline: Pipeline, args: argparse.Namespace, stop: threading.Event) -> Result:
    from headwater.jobs.drop import drop

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


def _say(line: str) -> None:
    """Progress of a job: a person's business, so never on stdout."""
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="headwater",
        allow_abbrev=False,
        description="Keeps a Delta lake in step with a PostgreSQL database.",
        epilog="Exit status: 0 done, 1 failed (try again), 2 refused (a person must act), 3 not fresh in time, "
        "4 some tables are suspended, 5 verify found differences or a validation failed.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, run: Callable[..., Result], *, tables: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False)
        sub.add_argument("pipeline", metavar="PIPELINE.yaml", help="the pipeline file")
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout")
        if tables:
            text = "a table, as SQL names it; repeatable (default: every table)"
            sub.add_argument("--table", metavar="T", action="append", type=_table, default=[], help=text)
        sub.set_defaults(run=run)
        return sub

    command("check", "check configuration, source settings, rights and replica identities", _check)
    load = command("load", "load tables; loaded ones are skipped, unfinished loads go on", _load, tables=True)
    load.add_argument("--again", action="store_true", help="load the named tables anew")
    text = "replace a table, or some of its partitions, by what the source holds; replication goes on meanwhile"
    reload = command("reload", text, _reload, tables=True)
    text = "instead: find what may differ by the source's catalog (attached, detached, rewritten), compare, and repair"
    reload.add_argument("--changed", action="store_true", help=text)
    reload.add_argument("--propose", action="store_true", help="as --changed, but only say what may differ and why")
    text = "a partition, or a subtree of them, as SQL names it; repeatable (default: the whole table)"
    reload.add_argument("--partition", metavar="P", action="append", default=[], help=text)
    replicate = command("replicate", "apply the source's log to the lake until stopped", _replicate)
    replicate.add_argument("--until", metavar="now|LSN", type=_now_or_lsn, help="stop once all up to there is in")
    replicate.add_argument("--max-seconds", metavar="N", type=_seconds, help="stop after so long")
    text = "take the running replicate's place without a pause, as soon as everything is ready"
    replicate.add_argument("--take-over", action="store_true", help=text)
    wait = command("wait", "wait until tables are fresh enough and print the cut", _wait, tables=True)
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
    command("status", "show state, position and lag of every table, and the slot", _status)
    verify = command("verify", "compare source and lake row by row", _verify, tables=True)
    verify.add_argument("--repair", action="store_true", help="put the rows right that differ, in one commit a table")
    validate = command("validate", "run expectation suites on a consistent cut", _validate, tables=True)
    text = "the cut: a file with what `wait --json` printed, or the newest one (default: newest)"
    validate.add_argument("--cut", metavar="FILE|newest", default="newest", help=text)
    text = "look only at rows that came since the last validation, where that says the same"
    validate.add_argument("--incremental", action="store_true", help=text)
    text = "where to write the HTML pages (default: in the lake)"
    validate.add_argument("--pages", metavar="FOLDER", type=os.path.abspath, help=text)
    text = "how long a cut that has passed stays readable (default: 24h, or lake.keep_cuts if that is longer)"
    validate.add_argument("--keep", metavar="24h", type=_seconds, help=text)
    command("maintain", "compact files, write checkpoints, remove what no cut needs any more", _maintain, tables=True)
    pausing = "single tables: their changes are not kept, resume loads them anew (default: the pipeline)"
    for name, text, run in (
        ("pause", "let no replicate run until resume; the source keeps its log", _pause),
        ("resume", "end a pause", _resume),
    ):
        command(name, text, run).add_argument(
            "--table", metavar="T", action="append", type=_table, default=[], help=pausing
        )
    command("drop", "remove slot and publication at the source; the lake stays", _drop)
    # Only listed here: `main` hands its arguments over unread.
    commands.add_parser("demo", help="the whole way on an embedded PostgreSQL", add_help=False)
    return parser


def _table(text: str) -> TableName:
    try:
        return TableName.parse(text, default_schema="public")
    except BadName as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _partition(text: str, table: TableName) -> TableName:
    try:
        return TableName.parse(text, default_schema=table.schema)
    except BadName as error:
        raise Refused(str(error), code="usage", where="--partition", remedy="headwater reload --help") from None


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
    from headwater.lake.freshness import parse_requirement

    try:
        parse_requirement(text)
    except Refused as refused:
        raise argparse.ArgumentTypeError(f"{refused.message}: {refused.remedy}") from None
    return text


@contextmanager
def _signals(stop: threading.Event, *, clean: bool) -> Iterator[None]:
    """SIGTERM and SIGINT: with `clean` they ask for a clean stop, else they end the command at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us in another has its own
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not clean:
            raise _Stopped(number)
        # A second Ctrl-C must help a person whose clean stop hangs. A second SIGTERM is only a nervous supervisor.
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _result_stream(as_json: bool) -> Iterator[TextIO]:
    """Where the result goes. With --json nothing else reaches stdout, not even from a JVM that we start."""
    out = sys.stdout
    try:
        is_stdout = as_json and out.fileno() == 1
    except (OSError, ValueError):
        is_stdout = False
    if not is_stdout:
        yield out
        return
    out.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _log_to_stderr(scrubber: Scrubber) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ScrubbingFormatter(scrubber))
    logging.basicConfig(handlers=[handler], level=os.environ.get("HEADWATER_LOG", "INFO").upper())
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it announces every connection that it closes


if __name__ == "__main__":
    sys.exit(main())
