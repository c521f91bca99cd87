"""A job that is killed at any moment, with or without the driver beside it, is simply run again: it succeeds, and the
lake equals the source. This is what a retry of Airflow does.

A seed decides what runs, and when it is killed; HEADWATER_SEED replays one, HEADWATER_SOAK=1 draws many.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.great_bank import OPTIONS, TABLES, create_great_bank, writing
from fixtures.jobs import Job, assert_equal, catch_up, load_tables, record_of
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database, new_database
from fixtures.soak import SOAK
from fixtures.waiting import until
from headwater.demo.postgres import EmbeddedServer
from headwater.monitor.status import status
from headwater.pipeline_file.pipeline import Pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JOBS = (
    *("load again", "reload", "reload part", "reload where", "reload changed", "rebuild", "new table", "repair"),
    *("load all again", "maintain"),
)
_TURNS = range(int(os.environ.get("HEADWATER_SOAK_SEEDS", "200"))) if SOAK else (_JOBS.index("rebuild"),)


@dataclass
class Ground:
    folder: Path
    database: Database
    options: dict[str, dict[str, Any]] = field(default_factory=lambda: dict(OPTIONS))
    extra: list[str] = field(default_factory=list)

    @property
    def tables(self) -> list[str]:
        return [*TABLES, *self.extra]

    def pipeline(self) -> Pipeline:
        entries = [{"name": name, **self.options.get(name, {})} for name in self.tables]
        return write_pipeline(self.folder, self.database, *entries, replicate={"max_seconds": 0.05})

    def command(self, job: str, chance: random.Random) -> list[str]:
        if job == "load again":
            named = chance.sample(("counters", "entries", "documents", "scratch", "events", "readings"), 2)
            return ["load", "--again", *(word for name in named for word in ("--table", name))]
        if job == "reload":
            return ["reload", "--table", chance.choice(("documents", "readings"))]
        if job == "reload part":
            return ["reload", "--table", "readings", "--partition", chance.choice(("readings_eu", "readings_us"))]
        if job == "reload where":
            return ["reload", "--table", "readings", "--where", "id between 50 and 150"]
        if job == "reload changed":
            self.database.execute("vacuum full documents")
            return ["reload", "--changed"]
        if job == "rebuild":
            name, column = chance.choice((("public.readings", "region"), ("public.documents", "edits")))
            self.options[name] = {} if self.options.get(name) else {"partition_by": [column]}
            self.pipeline()
            return ["rebuild", "--table", name]
        if job == "new table":
            name = f"public.new_{len(self.extra)}"
            self.database.execute(
                f"create table {name} (id int primary key, note text)",
                f"insert into {name} select i, repeat('n', 500) || i from generate_series(1, 2000) i",
            )
            self.extra.append(name)
            self.pipeline()
            return ["load"]
        return {"repair": ["verify", "--repair"], "load all again": ["load", "--again"], "maintain": ["maintain"]}[job]


def _is_only_scratch(result: dict[str, Any]) -> bool:
    """It is truncated faster than it can be read."""
    tables = result["tables"].items()
    bad = {name for name, table in tables if table["state"] == "suspended" or not table.get("compared", True)}
    return bad <= {"public.scratch"}


@pytest.fixture(scope="module")
def ground(
    each_store: str, postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    with new_database(postgres) as database:
        create_great_bank(database)
        database.allow_publishing()
        made = Ground(tmp_path_factory.mktemp("ground"), database)
        pipeline = made.pipeline()
        load_tables(pipeline)
        catch_up(pipeline)
        yield made


@pytest.mark.postgres
@pytest.mark.spark
@pytest.mark.parametrize("turn", _TURNS if "HEADWATER_SEED" not in os.environ else [0])
def test_a_job_that_is_killed_is_run_again(turn: int, ground: Ground, spark: SparkSession) -> None:
    drawn = random.SystemRandom().randrange(1 << 31) if SOAK else turn
    seed = int(os.environ.get("HEADWATER_SEED", drawn))
    chance = random.Random(seed)
    job = _JOBS[seed % len(_JOBS)]
    beside, driver_dies = chance.random() < 0.6, chance.random() < 0.4
    pipeline = ground.pipeline()
    command = ground.command(job, chance)
    story = [f"HEADWATER_SEED={seed} {job=} {command=} {beside=} {driver_dies=}"]
    print(story[0])
    try:
        with writing(ground.database, seed, chance.choice((0.005, 0.02)), chance.choice((0.0, 0.02))):
            driver = None
            with ExitStack() as running:
                if beside:
                    driver = first = running.enter_context(Job(pipeline, "replicate"))
                    until(lambda: status(pipeline)["running"] or first.process.poll() is not None, "the driver runs")
                for _ in range(chance.choice((1, 1, 2))):
                    with Job(pipeline, *command, spark=spark) as one:
                        due = time.monotonic() + chance.choice((chance.uniform(0.05, 1.0), chance.uniform(0.05, 4.0)))
                        while time.monotonic() < due and one.process.poll() is None:
                            time.sleep(0.02)
                        story.append(f"killed; was {one.process.poll()}: {one.log[-800:]}")
                if driver is not None and driver_dies:
                    story.append(f"driver dies: {driver.log[-500:]}")
                    os.killpg(driver.pid, 9)
                    driver.wait()
                    if chance.random() < 0.7:
                        driver = running.enter_context(Job(pipeline, "replicate"))
                began = time.monotonic()
                with Job(pipeline, *command, spark=spark) as again:
                    ended = again.wait(150)
                    story.append(f"again: {ended} after {time.monotonic() - began:.1f} s {again.log[-3000:]}")
                    out = again._out.read_text()[-2000:]
                    assert ended == 0 or (ended == 4 and _is_only_scratch(again.result)), (
                        f"it ended with {ended}: {out}"
                    )
                if driver is not None:
                    story.append(f"driver: {driver.process.poll()} {driver.log[-2000:]}")
        for name in ground.tables:
            if record_of(pipeline, name).state == "suspended":
                story.append(f"{name} is suspended: {record_of(pipeline, name).reason}")
                assert name == "public.scratch", name
                load_tables(pipeline, name, again=True)
        catch_up(pipeline)
        catch_up(pipeline)
        assert_equal(ground.database, pipeline, *ground.tables)
        assert {record_of(pipeline, name).state for name in ground.tables} == {"active"}
    except BaseException as error:
        error.add_note("\n".join(story))
        raise
    finally:
        print("\n".join(story))
