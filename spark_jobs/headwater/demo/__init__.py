"""`headwater demo`: the whole way on an embedded PostgreSQL and a private Airflow, with a proof at its end.

    headwater demo [--json]            about two minutes; ends with 0 only if the proof holds
    headwater demo --keep-running      the same, and stays: prints the address of the Airflow UI (`make up`)
    headwater demo --stop              ends what `--keep-running` left (`make down`)
    headwater demo --lake s3://bucket/prefix    with the lake in an object store, entered by the environment

Everything lies in one temporary folder and is removed with it; so is a lake in a store.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from headwater.errors import EXIT_DIFFERENCES, EXIT_DONE

_WRITES_PER_SECOND = 5.0


def parser() -> argparse.ArgumentParser:
    """Of the options behind `headwater demo`."""
    made = argparse.ArgumentParser(prog="headwater demo", description="Try everything on an embedded PostgreSQL.")
    made.add_argument("--json", action="store_true", help="the result as one JSON object on stdout")
    made.add_argument("--lake", default="", metavar="ROOT", help="an object store's: s3://bucket/prefix")
    which = made.add_mutually_exclusive_group()
    which.add_argument("--keep-running", action="store_true", help="leave it running in the background")
    which.add_argument("--stop", action="store_true", help="end what --keep-running left running")
    which.add_argument("--in-background", action="store_true", help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs the demo; the exit status."""
    args = parser().parse_args(argv)

    from headwater.demo import state

    if args.stop:
        return state.stop_background()
    if args.keep_running:
        return state.start_in_background(["--lake", args.lake] if args.lake else [])
    return _demo(as_json=args.json, stay=args.in_background, lake=args.lake)


def _demo(*, as_json: bool, stay: bool, lake: str) -> int:
    import os
    import signal

    from rich.console import Console

    from headwater.demo.environment import demo_environment
    from headwater.demo.shop import Writer
    from headwater.demo.state import Running
    from headwater.demo.story import Story
    from headwater.spark.jars import jar_paths
    from headwater.spark.java import require_java
    from headwater.spark.parent_watch import process_start
    from headwater.spark.stores import require_jars

    # What would fail only after half a minute, in a Spark job's log, is refused here.
    require_java()
    jar_paths()
    require_jars(lake)
    started = time.monotonic()
    console = Console(stderr=as_json, soft_wrap=True)
    console.print("Starting a PostgreSQL server with a small shop, and Airflow beside it; two to five minutes in all")
    with demo_environment(lake=lake) as demo:
        if stay:
            running = Running(os.getpid(), process_start(os.getpid()) or "", str(demo.airflow.home))
            running.write()
        writer = Writer(demo.server.connect("shop"), _WRITES_PER_SECOND)
        story = Story(demo, writer, console, started)
        version = demo.connection.info.server_version // 10000
        story.say(f"PostgreSQL {version} runs with the shop in it, and a writer begins to sell")
        writer.start()
        try:
            outcome = story.tell()
            story.show(outcome)
            if as_json:
                print(json.dumps(outcome.to_json()), flush=True)
            if stay and outcome.proven:
                story.say(
                    f"Airflow goes on running: {demo.airflow.address} (no password; in its menu: Browse, Headwater)"
                )
                story.say("end it with: headwater demo --stop")
                sys.stdout.flush()
                Running(running.pid, running.start, running.airflow_home, demo.airflow.address).write()
                while True:
                    signal.pause()  # SIGTERM raises, and everything is ended on the way out
        finally:
            writer.stop()
        story.say("ending Airflow and PostgreSQL")
    if outcome.proven and not as_json:
        story.say(
            "next: `headwater demo --keep-running` stays up, for a browser; `headwater init` begins your own pipeline"
        )
    return EXIT_DONE if outcome.proven else EXIT_DIFFERENCES
