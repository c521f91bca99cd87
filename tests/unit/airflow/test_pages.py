"""The pages' app behind Airflow's authentication: who sees what, what a lake shows, and that nothing secret is told."""

from __future__ import annotations

import re
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fixtures.lakes import HandLake, position_at
from fixtures.pages import NOWHERE, PASSWORD, Pages, page_pipeline
from headwater import store_connections
from headwater.errors import Transient
from headwater.lake.ledger import TableVersion
from headwater.lake.look import Look
from headwater.lake.reader import LakeReader
from headwater.lake.registry import now_text
from headwater.lake.reload_records import Keeping, Reload
from headwater.lake.wait_log import Waited, record
from headwater.monitor.metrics import METRICS
from headwater.monitor.overview import PipelineWatch
from headwater.monitor.recent_epochs import RecentEpochs
from headwater.names import TableName

ROOT = Path(__file__).resolve().parents[3]
API = "api/pipelines"


def hand_lake(folder: Path, name: str, *tables: str) -> HandLake:
    return HandLake(folder / f"{name}_lake", position_at(), tables, pipeline=name)


def publish(lake: HandLake, lsn: int, path: str, rows: int, stages: dict[str, float], *touched: str) -> None:
    """An epoch whose row tells how it came about."""
    lake.position = lake.position.at(lsn)
    for name in touched:
        lake.versions[name] = TableVersion(lake.versions[name].version + 1, lsn, "active", rows, path, True)
    lake.ledger.publish(
        lake.position,
        {name: lake.versions[name] for name in touched},
        all_tables=dict(lake.versions),
        source_time=datetime.now(UTC),
        sample=None,
        stages=stages,
    )


def addresses(pages: Pages) -> list[str]:
    """One address for every route of the app."""
    filled = {"{name}": "shop", "{_name}": "shop", "{table:path}": "public.a", "{_table:path}": "public.a"}
    found = []
    for route in pages.app.routes:
        assert isinstance(route, APIRoute)
        path = route.path.removeprefix("/").replace("{_version}/{file:path}", "x/page.js")
        for parameter, value in filled.items():
            path = path.replace(parameter, value)
        assert "{" not in path
        found.append(path)
    assert len(found) >= 8
    return found


def test_nothing_is_answered_without_a_user(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    stranger, forger = pages.client(None), pages.client(None)
    forger.headers["Authorization"] = "Bearer eyJhbGciOiJub25lIn0.e30."
    for address in addresses(pages):
        assert stranger.get(address).status_code == 401, address
        assert forger.get(address).status_code == 403, address


def test_a_bearer_token_is_as_good_as_the_cookie(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    signed_in = pages.client("everything")
    scraper = pages.client(None)
    scraper.headers["Authorization"] = f"Bearer {signed_in.cookies['_token']}"
    assert 'headwater_pipeline_up{pipeline="shop"} 1.0' in scraper.get("metrics").text


def test_a_user_sees_the_pipelines_whose_dags_they_may_read(pages: Pages) -> None:
    for name in ("shop", "bank"):
        page_pipeline(pages.folder, name, "public.a")
    teller = pages.client("bank")
    assert [one["pipeline"] for one in teller.get(API).json()["pipelines"]] == ["bank"]
    assert teller.get(f"{API}/bank").status_code == 200
    assert teller.get(f"{API}/bank/tables/public.a").status_code == 200
    assert teller.get(f"{API}/shop").status_code == 404
    assert teller.get(f"{API}/shop/tables/public.a").status_code == 404
    assert teller.get(f"{API}/shop").json()["detail"].replace("shop", "X") == (
        teller.get(f"{API}/nothing").json()["detail"].replace("nothing", "X")
    )
    assert "shop" not in teller.get("metrics").text
    assert [one["pipeline"] for one in pages.client("everything").get(API).json()["pipelines"]] == ["bank", "shop"]


def test_a_user_sees_the_waits_of_tasks_whose_dags_they_may_read(pages: Pages) -> None:
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session

    a_dag: Any = DagModel
    page_pipeline(pages.folder, "bank", "public.a")
    lake = hand_lake(pages.folder, "bank", "public.a")
    dags = ("bank", "bank.report", "bank.report.late", "payroll.bank")
    waiters = {
        "bank.report.late.wait": "bank",  # three DAGs may be meant
        "payroll.bank.group.wait": "",
        "bank.gone.wait": "",
        "bank.report.wait": "bank",
        "wait on a_host": "bank",
        "": "bank",
    }
    for who in waiters:
        record(lake.root, Waited(now_text(), who, "now", (), "satisfied", 1.0))
    with create_session() as session:
        session.add(DagBundleModel(name="some"))
        session.flush()
        session.add_all(a_dag(dag_id=dag_id, bundle_name="some") for dag_id in dags[1:])

    def seen(user: str) -> set[str]:
        return {wait["who"] for wait in pages.client(user).get(f"{API}/bank").json()["waits"]}

    try:
        assert seen("everything") == set(waiters)
        assert seen("bank") == {who for who, user in waiters.items() if user == "bank"}
        with create_session() as session:
            session.add(a_dag(dag_id=dags[0], bundle_name="some"))
        assert seen("bank") == {"wait on a_host", ""}, "`bank` is a DAG that this user may not read"
        assert seen("everything") == set(waiters)
    finally:
        with create_session() as session:
            session.query(DagModel).where(DagModel.dag_id.in_(dags)).delete()
            session.query(DagBundleModel).delete()


def test_a_faulty_file_is_shown_to_those_who_may_see_import_errors_and_leaves_the_others(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    (pages.folder / "broken.yaml").write_text("pipeline: broken\nsauce: {}\n")
    found = pages.client("everything").get(API).json()
    assert [one["pipeline"] for one in found["pipelines"]] == ["shop"]
    (fault,) = found["faults"]
    assert fault["file"].endswith("broken.yaml")
    assert "sauce" in fault["message"]
    assert 'headwater_pipeline_up{pipeline="broken"} 0.0' in pages.client("everything").get("metrics").text
    limited = pages.client("shop")
    assert limited.get(API).json()["faults"] == []
    assert "broken" not in limited.get("metrics").text


def test_a_file_that_could_not_be_read_for_a_moment_is_read_again(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    away = Transient("the pipeline file cannot be read", where=str(pages.folder / "shop.yaml"))
    monkeypatch.setattr("headwater_airflow.page.watches.read_pipelines", lambda pattern: ([], [away]))
    client = pages.client("everything")
    assert client.get(API).json()["faults"][0]["message"] == "the pipeline file cannot be read"
    monkeypatch.undo()
    monkeypatch.setattr("headwater_airflow.page.watches._FILES_SECONDS", 0.0)
    found = client.get(API).json()
    assert ([one["pipeline"] for one in found["pipelines"]], found["faults"]) == (["shop"], [])


def test_a_changed_file_is_read_again(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    client = pages.client("everything")
    assert client.get(f"{API}/shop/tables/public.b").status_code == 404
    page_pipeline(pages.folder, "shop", "public.a", "public.b")
    deadline = time.monotonic() + 10
    while client.get(f"{API}/shop/tables/public.b").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_answer_holds_a_secret(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    lake = hand_lake(pages.folder, "shop", "public.a")
    # A message that somebody wrote with a connection string in it is not passed on either.
    lake.enter("public.a", "suspended", f"cannot read {NOWHERE}", "ALTER ROLE x; -- password=hunter2")
    (pages.folder / "broken.yaml").write_text(f"pipeline: broken\nsource: {{connection: '{NOWHERE}', x: 1}}\n")
    client = pages.client("everything")
    for _ in range(2):  # the second time with the source's answer
        for address in addresses(pages):
            answer = client.get(address)
            assert answer.status_code == 200, address
            assert PASSWORD not in answer.text, address
            assert "hunter2" not in answer.text, address
        time.sleep(0.5)
    assert "cannot read" in client.get(f"{API}/shop").text


def test_a_password_that_is_an_ordinary_word_spoils_no_name(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a", source="postgresql://public:shop@127.0.0.1:1/shop")
    client = pages.client("everything")
    for _ in range(2):
        found = client.get(f"{API}/shop").json()
        assert found["pipeline"] == "shop"
        assert found["file"].endswith("/shop.yaml")
        time.sleep(0.5)


def test_a_pipeline_shows_its_state_its_epochs_and_what_needs_a_person(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a", "public.b", "public.c")
    lake = hand_lake(pages.folder, "shop", "public.a", "public.b")
    lake.publish(0x2000)
    publish(lake, 0x3000, "merge", 7, {"decode": 0.1, "write": 0.4}, "public.a")
    publish(lake, 0x4000, "positional", 2, {"decode": 0.2, "write": 0.1}, "public.a", "public.b")
    lake.enter("public.b", "suspended", "a value does not fit", "headwater load shop.yaml --table public.b --again")
    found = pages.client("everything").get(f"{API}/shop").json()
    assert found["state"] == "suspended"
    assert found["health"] == {
        "level": "degraded",
        "sentence": "Degraded: public.b is suspended: a value does not fit; the source does not answer.",
        "remedy": "headwater load shop.yaml --table public.b --again",
        "table": "public.b",
        "cure": {"dag": "load", "conf": {"tables": ["public.b"], "again": True}},
    }
    assert found["tables"] == {"active": 1, "new": 1, "suspended": 1}
    (attention,) = found["attention"]
    assert attention["table"] == "public.b"
    assert attention["reason"] == "a value does not fit"
    assert attention["remedy"].endswith("--again")
    assert attention["since"].endswith("Z")
    newest, before, _ = found["epochs"]
    assert (newest["epoch"], newest["touched"], newest["changes"]) == (3, 2, 4)
    assert newest["longest_stage"] == "decode"
    assert newest["bytes"] == 0x1000
    assert (before["longest_stage"], before["latency"]) == ("write", 0.5)
    rows = {row["table"]: row for row in found["table_list"]}
    assert rows["public.a"]["paths"] == {"merge": 1, "positional": 1}
    assert rows["public.a"]["changes"] == 9
    assert rows["public.a"]["applied_lsn"] == "0/4000"
    assert rows["public.a"]["latency"] == [0.5, 0.3]
    assert rows["public.c"]["state"] == "new"
    # The last hours are told from more rows of the ledger than are kept in view.
    few = RecentEpochs(lake.root, kept=1)
    few.refresh()
    assert [epoch.epoch for epoch in few.epochs] == [3]
    for history in (found["history"], few.latencies.to_json(datetime.now(UTC))):
        hours = history["ranges"]["6 h"]
        assert (hours["step"], len(hours["longest"])) == (300, 72)
        assert max(filter(None, hours["longest"])) == 0.5
        assert hours["longest"].count(None) >= 70, "where nothing was published is a gap"
    assert [mark["what"] for mark in found["history"]["marks"]][-1] == "public.b was suspended"
    assert rows["public.c"]["remedy"].startswith("headwater load ")
    assert found["source"]["answers"] is False
    assert found["lag_seconds"] is None


def test_later_epochs_are_added_to_what_was_seen(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    lake = hand_lake(pages.folder, "shop", "public.a")
    lake.publish(0x2000, "public.a")
    client = pages.client("everything")
    assert [epoch["epoch"] for epoch in client.get(f"{API}/shop").json()["epochs"]] == [1]
    for number in range(2, 6):
        lake.publish(0x2000 + number, "public.a")
    deadline = time.monotonic() + 10
    while (found := client.get(f"{API}/shop").json())["epoch"] != 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [epoch["epoch"] for epoch in found["epochs"]] == [5, 4, 3, 2, 1]
    assert found["table_list"][0]["version"] == 5


def test_a_table_shows_how_it_was_applied(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", 'public."Order Lines/x"', defaults={"freshness": "30s"})
    name = 'public."Order Lines/x"'
    lake = hand_lake(pages.folder, "shop", name)
    lake.publish(0x2000)
    commits = [
        '{"commitInfo": {"operation": "MERGE", "userMetadata": "headwater planned on 0: by Spark: it must"}}',
        '{"commitInfo": {"operation": "MERGE", "userMetadata": "headwater planned on 1"}}',
        '{"commitInfo": {"operation": "OPTIMIZE", "operationParameters": {}}}',
        *['{"commitInfo": {"operationParameters": {"because": "only inserts"}}}'] * 27,
    ]
    log = Path(lake.root, TableName.parse(name).path, "_delta_log")
    log.mkdir(parents=True)
    for version, info in enumerate(commits, start=1):
        publish(lake, 0x2000 + version, "append", 5, {"write": 0.2}, name)
        (log / f"{version:020}.json").write_text(f'{info}\n{{"txn": {{}}}}\n')
    found = pages.client("everything").get(f"{API}/shop/tables/public.%22Order%20Lines%2Fx%22").json()
    assert found["table"] == name
    shown = [(epoch["path"], epoch["rows"], epoch["version"]) for epoch in found["history"]]
    assert shown == [("append", 5, version) for version in range(30, 0, -1)]
    reasons = [epoch["because"] for epoch in found["history"]]
    gathered = "small files were made into larger ones; rows are what they were"
    assert reasons == ["only inserts"] * 27 + [gathered, None, "by Spark: it must"]
    assert found["freshness_seconds"] == 30
    assert found["on_divergence"] == "suspend"
    assert found["files"] is None  # a hand lake has no data


def test_a_source_that_does_not_answer_does_not_hold_the_page_up(pages: Pages) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        address = f"postgresql://someone:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/nowhere"
        page_pipeline(pages.folder, "shop", "public.a", source=address)
        lake = hand_lake(pages.folder, "shop", "public.a")
        lake.publish(0x2000, "public.a")
        client = pages.client("everything")
        client.get("static/x/page.js")  # what the first request ever costs is not the source's
        began = time.monotonic()
        found = client.get(f"{API}/shop").json()
        assert time.monotonic() - began < 3
    assert found["source"] == {"answers": False, "age_seconds": None, "reason": "the source has not answered yet"}
    assert found["epoch"] == 1
    assert found["slot"]["reason"] == "the source has not answered yet"


def test_a_lake_that_hangs_takes_neither_the_threads_of_the_server_nor_those_of_other_pipelines(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("hung", "bank"):
        page_pipeline(pages.folder, name, "public.a")
        hand_lake(pages.folder, name, "public.a").publish(0x2000, "public.a")
    over, look = threading.Event(), LakeReader.look

    def hanging(self: LakeReader) -> Look:
        if "hung" in self._root:
            over.wait(120)
        return look(self)

    monkeypatch.setattr(LakeReader, "look", hanging)
    monkeypatch.setattr("headwater_airflow.page.app._SCRAPE_SECONDS", 0.1)
    client = pages.client("everything")
    try:
        for number in range(12):
            shown = client.get(f"{API}/hung/tables/public.a{number}").json()
            assert shown == {"pipeline": "hung", "table": f"public.a{number}", "state": "gathering"}
        for path in (f"{API}/hung", "metrics"):
            assert client.get(path).status_code == 200
        monkeypatch.setattr("headwater_airflow.page.app._SCRAPE_SECONDS", 60)
        assert client.get(f"{API}/bank/tables/public.a").json()["state"] == "active"
    finally:
        over.set()


def test_a_lake_whose_keys_are_not_to_be_had_is_its_pipelines_error_and_its_alone(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_pipeline(pages.folder, "bank", "public.a")
    page_pipeline(pages.folder, "shop", "public.a", lake={"root": "s3://nowhere/shop", "airflow": "analytics"})
    over = threading.Event()

    def fetch(conn_id: str) -> str:
        assert over.wait(120)
        raise Transient(f"the Airflow connection {conn_id} gave no keys", where="lake.airflow", remedy="see there")

    monkeypatch.setattr(store_connections, "_fetch", fetch)
    monkeypatch.setattr("headwater_airflow.page.app._SCRAPE_SECONDS", 0.1)
    client = pages.client("everything")
    try:
        assert client.get(f"{API}/shop").json()["state"] == "gathering"
        monkeypatch.setattr("headwater_airflow.page.app._SCRAPE_SECONDS", 60)
        assert client.get(f"{API}/bank").json()["state"] == "new"
    finally:
        over.set()
    shown = client.get(f"{API}/shop").json()
    assert (shown["state"], shown["error"]["message"]) == (
        "unreadable",
        "the Airflow connection analytics gave no keys",
    )
    found = {one["pipeline"]: one["state"] for one in client.get(API).json()["pipelines"]}
    assert found == {"bank": "new", "shop": "unreadable"}
    scraped = client.get("metrics").text
    assert 'headwater_pipeline_up{pipeline="shop"} 0.0' in scraped
    assert 'headwater_pipeline_up{pipeline="bank"} 1.0' in scraped
    # Once there are keys, they are taken.
    monkeypatch.setattr(store_connections, "_fetch", lambda conn_id: '{"secrets": {}}')
    monkeypatch.setattr(PipelineWatch, "details", lambda watch: {"state": watch.pipeline.lake_path()})
    assert client.get(f"{API}/shop").json()["state"] == "s3://nowhere/shop"


def test_a_lake_that_cannot_be_read_is_its_pipelines_error(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    page_pipeline(pages.folder, "bank", "public.a")
    HandLake(pages.folder / "shop_lake", position_at(), ["public.a"], pipeline="another")
    found = {one["pipeline"]: one for one in pages.client("everything").get(API).json()["pipelines"]}
    assert found["bank"]["state"] == "new"
    assert found["shop"]["state"] == "unreadable"
    assert "belongs to the pipeline 'another'" in found["shop"]["error"]["message"]
    assert found["shop"]["error"]["remedy"]
    scraped = pages.client("everything").get("metrics").text
    assert 'headwater_pipeline_up{pipeline="shop"} 0.0' in scraped
    assert 'headwater_pipeline_up{pipeline="bank"} 1.0' in scraped


def test_the_metrics_are_openmetrics_and_say_what_the_lake_holds(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a", "public.b", defaults={"freshness": "30s"})
    lake = hand_lake(pages.folder, "shop", "public.a", "public.b")
    lake.publish(0x2000, "public.a", "public.b")
    lake.enter("public.b", "suspended", "a value does not fit")
    answer = pages.client("everything").get("metrics")
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    scraped = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }
    assert scraped["headwater_pipeline_epochs_total", "shop"] == 1
    assert scraped["headwater_pipeline_tables", "shop", "suspended"] == 1
    assert scraped["headwater_table_state", "public.b", "shop", "suspended"] == 1
    health = {key[1:]: value for key, value in scraped.items() if key[0] == "headwater_pipeline_health"}
    assert {level for labels, value in health.items() for level in {*labels} - {"shop"} if value} == {"degraded"}
    assert len(health) == 5
    assert scraped["headwater_table_freshness_seconds", "public.a", "shop"] == 30
    assert scraped["headwater_table_version", "public.a", "shop"] == 1
    assert scraped["headwater_source_up", "shop"] == 0
    assert 0 <= scraped["headwater_pipeline_publication_age_seconds", "shop"] < 600
    # What is not known is not there: no alert may take it for zero.
    assert not [key for key in scraped if key[0] in ("headwater_pipeline_lag_seconds", "headwater_slot_active")]


def test_the_reference_lists_every_metric_and_no_other() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    listed = {}
    for line in page[page.index("## Metrics") :].splitlines():
        if found := re.match(r"\| `(headwater_\w+)` \| (.*?) \|", line):
            listed[found[1]] = tuple(re.findall(r"`(\w+)`", found[2]))
    assert listed == {metric.sample: metric.labels for metric in METRICS}


def test_the_alert_rules_are_rules_and_ask_for_metrics_that_exist() -> None:
    import yaml

    rules: dict[str, Any] = yaml.safe_load((ROOT / "docs" / "alerts.yaml").read_text(encoding="utf-8"))
    assert set(rules) == {"groups"}
    known = {metric.sample for metric in METRICS}
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert len(alerts) >= 6
    for rule in alerts:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert {"summary", "action"} <= set(rule["annotations"])
        named = set(re.findall(r"headwater_\w+", rule["expr"]))
        assert named, rule["alert"]
        assert named <= known, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for text in rule["annotations"].values():
            labels = set(re.findall(r"\$labels\.(\w+)", text))
            used = [metric.labels for metric in METRICS if metric.sample in named]
            assert all(any(label in own for own in used) for label in labels), rule["alert"]


def test_the_plugin_registers_the_pages_without_making_the_app() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from headwater_airflow.plugin import HeadwaterPlugin as P;"
        "assert P.fastapi_apps[0]['url_prefix'] == '/headwater';"
        "assert P.external_views[0]['href'] == 'headwater/';"
        "assert 'headwater_airflow.page.app' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_page_has_a_strict_policy_and_knows_where_airflow_is(pages: Pages) -> None:
    answer = pages.client("everything").get("pipelines/shop/tables/public.a")
    assert '<base href="/headwater/" data-airflow="/" />' in answer.text
    policy = answer.headers["content-security-policy"]
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    (script,) = re.findall(r'<script type="module" src="(static/\w+/page\.js)"', answer.text)
    assert "immutable" in pages.client("everything").get(script).headers["cache-control"]
    preloaded = re.findall(r'rel="modulepreload" href="static/\w+/(\w+\.js)"', answer.text)
    modules = {file.name for file in (ROOT / "plugins/headwater_airflow/page/static").glob("*.js")}
    assert {*preloaded, "page.js"} == modules
    assert pages.client("everything").get("static/x/../../app.py").status_code == 404
    assert pages.client("everything").get("static/x/..%2Fapp.py").status_code == 404


def test_airflow_may_live_below_a_path_of_its_own(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    below = Pages(pages.folder, "/airflow").client("everything")
    assert '<base href="/airflow/headwater/" data-airflow="/airflow/" />' in below.get("pipelines/shop").text


def test_reloads_are_shown_with_what_has_become_of_them(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a", "public.b")
    lake = hand_lake(pages.folder, "shop", "public.a", "public.b")
    lake.publish(0x2000, "public.a")
    asked = Reload("one", "public.a", 0, (), "the whole table", "headwater reload 1", "asked", now_text())
    read = replace(asked, name="two", table="public.b", shown="public.b_2026", state="read", rows=7)
    kept = Keeping("one", "public.a", "keeping", 1, 0x2000, now_text())
    done = Keeping("two", "public.b", "done", 1, 0x2000, now_text(), version=4, lsn=0x3000, replaced=6)
    lake.registry.write(asked, read, kept, done)
    client = pages.client("everything")
    (running,) = client.get(f"{API}/shop").json()["reloads"]
    assert (running["table"], running["state"], running["part"]) == ("public.a", "keeping", "the whole table")
    (past,) = client.get(f"{API}/shop/tables/public.b").json()["reloads"]
    assert (past["state"], past["rows"], past["replaced"], past["version"]) == ("done", 7, 6, 4)


def test_a_pause_is_shown_as_such(pages: Pages) -> None:
    page_pipeline(pages.folder, "shop", "public.a")
    lake = hand_lake(pages.folder, "shop", "public.a")
    assert lake.registry.pipeline is not None
    lake.registry.write(replace(lake.registry.pipeline, paused="2026-03-01T00:00:00Z"))
    client = pages.client("everything")
    found = client.get(f"{API}/shop").json()
    assert (found["state"], found["paused"]) == ("paused", "2026-03-01T00:00:00Z")
    assert (found["health"]["level"], found["health"]["remedy"].split()[1]) == ("paused", "resume")
    assert 'headwater_pipeline_paused{pipeline="shop"} 1.0' in client.get("metrics").text
