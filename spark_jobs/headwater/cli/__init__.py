"""The command line: results to JSON or tables, errors to one sentence and an exit status, signals to an end.

What may be asked is `headwater.cli.arguments`' subject, what is done about it that of `headwater.cli.commands`. stdout
carries the result alone, all else goes to stderr. No password leaves this module: what is printed about an error has
the pipeline's own taken out.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TextIO

from headwater.cli import commands
from headwater.cli.arguments import complete, parse
from headwater.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_NOT_FRESH,
    HeadwaterError,
    SourceUnreachable,
    Transient,
    with_file,
)
from headwater.terminal.scrub import Scrubber, ScrubbingFormatter

log = logging.getLogger(__name__)


class _Stopped(BaseException):
    """A signal ended a command that has nothing to finish. No Exception: nothing may take it for a failure."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_status = 128 + signal_number


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status."""
    complete()
    arguments = list(sys.argv[1:] if argv is None else argv)
    stop = threading.Event()
    scrubber = Scrubber()
    try:
        with _signals(stop, clean=arguments[:1] in (["replicate"], ["top"])):
            if arguments[:1] == ["demo"]:
                from headwater.demo import main as demo

                return int(demo(arguments[1:]))
            args = parse(arguments)
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
        done = commands.run(args, stop, scrubber.learn, out)
    except BrokenPipeError:
        raise
    except Exception as error:
        return _report(error, args, scrubber, out)
    if done is None:
        return EXIT_DONE
    result, exit_status = done
    if args.json:
        print(json.dumps(result), file=out, flush=True)
    else:
        from headwater.terminal.render import render

        render(args.command, result, out, verbose=getattr(args, "verbose", False))
    return exit_status


def _report(error: Exception, args: argparse.Namespace | None, scrubber: Scrubber, out: TextIO) -> int:
    """Says what went wrong, on stderr and with --json on stdout; the exit status."""
    if os.environ.get("HEADWATER_DEBUG") == "1":
        print(scrubber.scrub("".join(traceback.format_exception(error))), file=sys.stderr)
    known = _known(error)
    if args is not None and getattr(args, "pipeline", None):
        known.remedy = with_file(known.remedy, args.pipeline)
    exit_status, sentence = known.exit_status, str(known)
    command = args.command if args else ""
    if command == "wait" and isinstance(error, SourceUnreachable):
        exit_status = EXIT_NOT_FRESH
    if args and args.json:
        body: dict[str, Any] = known.to_json()
        if command == "check":
            body = {"ok": False, "problems": _as_problems(known), **body}
        print(json.dumps(scrubber.scrub_all(body)), file=out, flush=True)
    print(scrubber.scrub(f"{f'headwater {command}'.rstrip()}: {sentence}"), file=sys.stderr)
    return exit_status


def _known(error: Exception) -> HeadwaterError:
    if isinstance(error, HeadwaterError):
        return error
    # Arrow's errors name no file at all, a configuration's may name a relative one: neither is the store's.
    if isinstance(error, OSError) and "://" in (place := str(error.filename or "")):
        return Transient(
            f"the lake's store does not do what it is asked: {error.strerror}",
            code="lake_unavailable",
            where=place,
            remedy="see whether it answers and lets you in, then run the command again: nothing is lost",
        )
    return HeadwaterError(
        f"{type(error).__name__}: {error}", code="unexpected", remedy="HEADWATER_DEBUG=1 shows where it happened"
    )


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
    levels = logging.getLevelNamesMapping()
    level = (os.environ.get("HEADWATER_LOG") or "INFO").upper()
    logging.basicConfig(handlers=[handler], level=levels.get(level, logging.INFO))
    if level not in levels:
        log.warning("HEADWATER_LOG is no level of logging (such as DEBUG, INFO, WARNING, ERROR): INFO is used")
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it announces every connection that it closes
    # And this one every function that it does not register.
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
