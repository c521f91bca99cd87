"""What the demo shows, step by step: load, replicate, wait, compute on a cut, and the proof that it is exact."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rich.console import Console
from rich.table import Table

from headwater.demo.environment import PIPELINE, Demo, process_environment
from headwater.demo.shop import TABLES, Revenue, Writer
from headwater.errors import HeadwaterError, Transient
from headwater.position import format_lsn, parse_lsn

LOAD, RELOAD, REPLICATE = (f"{PIPELINE}.{job}" for job in ("load", "reload", "replicate"))
DOWNSTREAM, SENSOR, AGGREGATE = "headwater_example_downstream", "wait_for_fresh_lake", "revenue_per_region"
_RUN_SECONDS = 900.0


@dataclass(frozen=True)
class DemoOutcome:
    """What the demo found. `proven`: the lake's answer is the source's own at the cut's position."""

    proven: bool
    cut: dict[str, Any]
    lake: Revenue
    source: Revenue
    transactions: int
    wait_seconds: float
    status: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        def readable(answer: Revenue) -> dict[str, list[str]]:
            return {region: [str(value) for value in values] for region, values in sorted(answer.items())}

        return {
            "proven": self.proven,
            "cut": self.cut,
            "transactions": self.transactions,
            "wait_seconds": round(self.wait_seconds, 2),
            "lake": readable(self.lake),
            "source": readable(self.source),
            "status": self.status,
        }


class Story:
    """Tells one demo on a console: each line with the seconds since the beginning."""

    def __init__(self, demo: Demo, writer: Writer, console: Console, started: float) -> None:
        self._demo = demo
        self._writer = writer
        self._console = console
        self._started = started

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._started:6.1f} s[/dim]  {text}", highlight=False)

    def tell(self) -> DemoOutcome:
        self.await_airflow()
        self.load()
        self.await_replication()
        run = self.downstream()
        return self.prove(run)

    def await_airflow(self) -> None:
        airflow = self._demo.airflow
        self.say("Airflow is starting (the longest part of the demo)")
        airflow.wait_until_healthy()
        deadline = time.monotonic() + 120
        while not {LOAD, REPLICATE, DOWNSTREAM} <= airflow.client.dag_ids():
            if time.monotonic() > deadline or airflow.client.import_errors():
                raise Transient(f"Airflow does not show the DAGs: {airflow.client.import_errors()}")
            time.sleep(0.5)
        self.say(f"Airflow is healthy and shows the DAGs made from {self._demo.pipeline_file.name}: {airflow.address}")

    def load(self) -> None:
        self.say(f"triggering {LOAD}: a Spark job copies the tables while the shop goes on selling")
        run = self.run(LOAD)
        result = self._demo.airflow.client.xcom(LOAD, run, "load")
        for name, table in sorted(result["tables"].items()):
            self.say(f"  {name}: {table['rows']} rows loaded, {table['state']}")

    def await_replication(self) -> None:
        """Until the first epoch is published by the slice that the load DAG let go."""
        from headwater.lake.position_file import read_position_file

        self.say(f"{LOAD} has unpaused {REPLICATE}: its first slice starts Spark and reads the log")
        deadline = time.monotonic() + _RUN_SECONDS
        while (found := read_position_file(self._demo.root)) is None or found.epoch < 1:
            self._check_writer()
            if time.monotonic() > deadline:
                raise Transient(f"nothing was replicated in {_RUN_SECONDS:.0f} s", where=REPLICATE)
            time.sleep(0.2)
        self.say(f"epoch {found.epoch} is published at {found.position}")

    def downstream(self) -> str:
        self.say(f"triggering {DOWNSTREAM}: it waits for everything that was committed before it began")
        return self.run(DOWNSTREAM)

    def run(self, dag: str) -> str:
        """One run, awaited; its id."""
        client = self._demo.airflow.client
        run = client.trigger(dag)
        state = client.wait_for_run(dag, run, _RUN_SECONDS, lambda task, state: self._task(dag, task, state))
        if state != "success":
            failed = [task for task, task_state in client.tasks(dag, run).items() if task_state == "failed"]
            logs = "\n".join(client.log(dag, run, task)[-3000:] for task in failed)
            raise HeadwaterError(f"the run ended as {state}: {failed}\n{logs}", where=dag)
        return run

    def prove(self, run: str) -> DemoOutcome:
        client = self._demo.airflow.client
        cut = client.xcom(DOWNSTREAM, run, SENSOR)
        wait = client.task(DOWNSTREAM, run, SENSOR)["duration"] or 0.0
        self._check_writer()
        position = parse_lsn(cut["position"]["lsn"])
        lake = self._lake_answer()
        source, transactions = self._demo.oracle.answer_at(position, self._writer.answers)
        seconds = float(cut.get("waited_seconds", wait))
        self.say(f"asking the source's own log (a second slot) what was committed up to {format_lsn(position)}")
        return DemoOutcome(lake == source, cut, lake, source, transactions, seconds, self._status())

    def show(self, outcome: DemoOutcome) -> None:
        status = outcome.status
        tables = Table(title="The lake")
        for column in ("table", "state", "rows", "lag", "version in the cut"):
            tables.add_column(column, justify="left" if column in ("table", "state") else "right")
        for name in sorted(f"public.{table}" for table in TABLES):
            now, then = status["tables"].get(name, {}), outcome.cut["tables"].get(name, {})
            lag = "" if now.get("lag_seconds") is None else f"{now['lag_seconds']:.1f} s"
            values = (name, now.get("state", ""), now.get("rows", ""), lag, then.get("version", ""))
            tables.add_row(*("" if value is None else str(value) for value in values))
        answers = Table(title=f"Revenue per region at {outcome.cut['position']['lsn']}")
        for column in ("region", "orders", "items", "lake (Spark job)", "source (its own log)", ""):
            answers.add_column(column, justify="right")
        for region in sorted({*outcome.lake, *outcome.source}):
            ours, theirs = outcome.lake.get(region), outcome.source.get(region)
            orders, items = (str(value) for value in (ours or theirs or (0, 0, Decimal(0)))[:2])
            amounts = (str(answer[2]) if answer else "-" for answer in (ours, theirs))
            answers.add_row(region, orders, items, *amounts, "equal" if ours == theirs else "[red]DIFFERENT[/red]")
        self._console.print(tables, answers)
        self.say(f"the cut: epoch {outcome.cut['epoch']} at {outcome.cut['position']['lsn']}")
        self.say(f"the sensor waited {outcome.wait_seconds:.1f} s; the lake lags {status.get('lag_seconds')} s now")
        verdict = "[bold green]exact[/bold green]" if outcome.proven else "[bold red]NOT exact[/bold red]"
        self.say(
            f"the answer is {verdict}: {outcome.transactions} transactions of the writer are in it, no more, no less"
        )

    def _task(self, dag: str, task: str, state: str | None) -> None:
        if state in ("running", "deferred", "success", "failed", "up_for_retry"):
            self.say(f"  {dag} / {task}: {state}")
        self._check_writer()

    def _check_writer(self) -> None:
        if self._writer.error is not None:
            raise HeadwaterError(f"the shop's writer failed: {self._writer.error}")

    def _lake_answer(self) -> Revenue:
        from deltalake import DeltaTable

        rows = DeltaTable(str(self._demo.output)).to_pyarrow_table().to_pylist()
        return {row["region"]: (row["orders"], row["items"], Decimal(row["revenue"])) for row in rows}

    def _status(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "headwater.cli", "status", str(self._demo.pipeline_file), "--json"]
        done = subprocess.run(command, env=process_environment(self._demo), capture_output=True, text=True)
        if done.returncode != 0:
            raise HeadwaterError(f"headwater status ended with {done.returncode}: {done.stdout or done.stderr}")
        return dict(json.loads(done.stdout))
