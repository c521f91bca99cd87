"""The role's password changes at the source while a driver runs, and all its sessions are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.jobs import Job, assert_equal, load_tables, until
from fixtures.loaded import loaded_pipeline
from fixtures.pipelines import write_pipeline
from fixtures.postgres import Database
from headwater.lake.ledger import read_generation
from headwater.lake.position_file import read_position_file
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.values import CONNECTION_SOCKET, connection_variable
from headwater.source.samples import commit_position

pytestmark = pytest.mark.postgres

FIRST, SECOND = "first-S3cret", "second-S3cret"
TABLE = "public.orders"


@pytest.fixture
def orders(database: Database) -> Database:
    database.allow_publishing()
    database.execute("create table orders (id int primary key, n int)", "insert into orders values (1, 1)")
    _set_password(database, FIRST)
    return database


def _set_password(database: Database, password: str) -> None:
    with database.superuser() as admin:
        admin.execute(f"alter role {database.role} password '{password}'")


def _cut_all(database: Database) -> None:
    with database.superuser() as admin:
        admin.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where usename = %s", [database.role]
        )


def _commit(database: Database, number: int) -> int:
    with database.connect() as connection:
        connection.execute("insert into orders values (%s, %s)", [number, number])
        return commit_position(connection).lsn


def _await(job: Job, pipeline: Pipeline, lsn: int) -> None:
    def published() -> bool:
        assert job.process.poll() is None, job.log[-3000:]
        file = read_position_file(pipeline.lake_path())
        return file is not None and file.position.lsn >= lsn

    until(published, "the commit is published")


def _password_file(folder: Path, password: str) -> Path:
    file = folder / "passwords"
    file.touch(mode=0o600)
    file.write_text(f"*:*:*:*:{password}\n")
    return file


def test_a_running_driver_goes_on_with_the_password_that_the_password_file_holds_by_now(
    orders: Database, tmp_path: Path
) -> None:
    file = _password_file(tmp_path, FIRST)
    server = f"host=127.0.0.1 port={orders.server.port} dbname={orders.name} user={orders.role}"
    pipeline = loaded_pipeline(tmp_path, orders, TABLE, source={"connection": f"{server} passfile={file}"})
    with Job(pipeline, "replicate") as job:
        _await(job, pipeline, _commit(orders, 2))
        generation = read_generation(pipeline.lake_path(), pipeline.name)
        _set_password(orders, SECOND)
        _password_file(tmp_path, SECOND)
        _cut_all(orders)
        _await(job, pipeline, _commit(orders, 3))
        assert read_generation(pipeline.lake_path(), pipeline.name) == generation, "the same driver goes on"
        job.process.terminate()
        assert job.wait() == 0, job.log[-3000:]
        said = job.log
    assert_equal(orders, pipeline, TABLE)
    assert FIRST not in said
    assert SECOND not in said


@pytest.mark.usefixtures("airflow_home")
def test_a_running_driver_goes_on_with_the_password_that_the_airflow_connection_has_by_now(
    orders: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater_airflow.hooks.source import connection_environment
    from headwater_airflow.operators.renewal import answering

    pipeline = write_pipeline(tmp_path, orders, TABLE, source={"connection": "airflow: shop_db"})

    def set_connection(password: str) -> None:
        text = orders.server.conninfo(orders.name, orders.role, password)
        monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", text.replace("postgresql:", "postgres:", 1))

    set_connection(FIRST)
    with answering("shop_db") as anew:
        for name, value in {**connection_environment("shop_db"), **anew}.items():
            monkeypatch.setenv(name, value)
        load_tables(pipeline)
        with Job(pipeline, "replicate") as job:
            _await(job, pipeline, _commit(orders, 2))
            generation = read_generation(pipeline.lake_path(), pipeline.name)
            _set_password(orders, SECOND)
            set_connection(SECOND)
            _cut_all(orders)
            _await(job, pipeline, _commit(orders, 3))
            assert read_generation(pipeline.lake_path(), pipeline.name) == generation, "the same driver goes on"
            job.process.terminate()
            assert job.wait() == 0, job.log[-3000:]
            said = job.log
        # As if a person had mistyped it: nobody is asked again and again.
        set_connection("third-S3cret")
        _set_password(orders, "fourth-S3cret")
        with Job(pipeline, "replicate") as job:
            assert job.wait() == 2, job.log[-3000:]
            assert job.result["error"]["code"] == "wrong_password"
    assert not Path(anew[CONNECTION_SOCKET]).parent.exists()
    set_connection("fourth-S3cret")
    for name, value in connection_environment("shop_db").items():
        monkeypatch.setenv(name, value)
    assert_equal(orders, pipeline, TABLE)
    assert "S3cret" not in said + job.log


def test_a_driver_whose_password_is_refused_by_now_asks_for_another_try_which_gets_the_new_one(
    orders: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator hands the connection over once a try: what it fetched is in the driver's environment."""
    pipeline = write_pipeline(tmp_path, orders, TABLE, source={"connection": "airflow: shop_db"})

    def hand_over(password: str) -> None:
        text = orders.server.conninfo(orders.name, orders.role, password)
        monkeypatch.setenv(connection_variable("shop_db"), text)

    hand_over(FIRST)
    load_tables(pipeline)
    with Job(pipeline, "replicate") as job:
        _await(job, pipeline, _commit(orders, 2))
        _set_password(orders, SECOND)
        _cut_all(orders)
        assert job.wait() == 1, job.log[-3000:]
        assert job.result["error"]["code"] in ("source_unreachable", "password_changed"), job.result
        assert FIRST not in job.log + str(job.result)
    hand_over(SECOND)
    with Job(pipeline, "replicate") as job:
        _await(job, pipeline, _commit(orders, 3))
        job.process.terminate()
        assert job.wait() == 0, job.log[-3000:]
    assert_equal(orders, pipeline, TABLE)
