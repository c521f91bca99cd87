"""The pages' scripts in a real browser: focus and text stay where they are while a page is built anew, and what waits
is found among all that Airflow knows of."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import headwater_airflow.page
from fixtures.browser import Browser

STATIC = Path(headwater_airflow.page.__file__).parent / "static"

BUILD = """
const [before, after] = arguments;
const { h, lay } = await import(new URL("dom.js", location.href));
const { attention, section } = await import(new URL("parts.js", location.href));
const blocks = {
  note: () => attention({ title: "public.orders is suspended" }),
  words: () => h("p.muted", null, "and one more"),
  facts: () => h("dl.facts", null, h("dt", null, "lag")),
  sensors: () => section("Waiting sensors", h("table", null)),
  tables: () => section("Tables", h("input", { type: "search" }), h("details", null, h("summary", null, "more"))),
  epochs: () => section("Newest epochs", h("table", null)),
  row: (name) => h("li", { "data-key": name }, h("a", { href: "#" }, name)),
};
const built = (names) => h("div", null, names.map((name) => (blocks[name] ?? (() => blocks.row(name)))()));
document.body.replaceChildren(built(before));
const shown = document.body.firstChild;
const chosen = shown.querySelector("input") ?? shown.querySelector("a");
chosen.focus();
if (chosen.nodeName === "INPUT") chosen.value = "order";
lay(shown, built(after));
return {
  same: document.activeElement === chosen,
  value: chosen.value ?? null,
  shown: shown.innerHTML === built(after).innerHTML,
};
"""


@pytest.fixture(scope="module")
def files() -> Iterator[str]:
    """The address of the page's scripts, as files."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=STATIC)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/page.css"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("facts tables epochs", "facts sensors tables epochs"),
        ("facts sensors tables epochs", "facts tables epochs"),
        ("facts tables", "note words facts tables"),
        ("note words facts tables", "facts tables"),
        ("note sensors tables", "facts tables epochs"),
        ("first second third", "third first second"),
        ("first second third", "second third first"),
    ],
)
def test_what_has_the_focus_keeps_it_when_others_come_go_or_move(
    browser: Browser, files: str, before: str, after: str
) -> None:
    browser.open(files)
    found = browser.script(f"return (async function () {{{BUILD}}})(...arguments)", before.split(), after.split())
    typed = "order" if "tables" in after else None
    assert found == {"same": True, "value": typed, "shown": True}


# Airflow's API, of whose DAGs at most 50 come at once; a prefix counts up to its last letter or digit.
DAGS = """
const [ids] = arguments;
const base = document.createElement("base");
base.href = location.href;
base.dataset.airflow = new URL("/", location.href).href;
document.head.append(base);
window.fetch = async (address) => {
  const { pathname, searchParams } = new URL(address);
  if (!pathname.endsWith("/dags")) return Response.json({ dag_runs: [] });
  const holds = searchParams.get("dag_id_pattern") ?? "", begins = searchParams.get("dag_id_prefix_pattern") ?? "";
  const dags = ids.filter((id) => id.includes(holds) && id.startsWith(begins.replace(/[^a-z0-9]+$/, "")));
  const first = Number(searchParams.get("offset") ?? 0);
  const some = dags.slice(first, first + Math.min(50, Number(searchParams.get("limit"))));
  return Response.json({ dags: some.map((dag_id) => ({ dag_id })), total_entries: dags.length });
};
const { dagsOf } = await import(new URL("airflow.js", location.href));
return Object.keys(await dagsOf("shop"));
"""


def test_a_pipeline_s_dags_are_found_among_those_of_many_with_a_similar_name(browser: Browser, files: str) -> None:
    ids = [f"{name}.{dag}" for number in range(60) for name in (f"a{number}_shop", f"shop{number}") for dag in "xyz"]
    browser.open(files)
    found = browser.script(
        f"return (async function () {{{DAGS}}})(...arguments)", [*ids, "shop.load", "shop.replicate"]
    )
    assert found == ["load", "replicate"]


# Airflow's API, of whose deferred tasks at most 50 come at once; task `n` has the trigger and the file of `tasks[n]`.
SENSORS = """
const [tasks] = arguments;
const base = document.createElement("base");
base.href = location.href;
base.dataset.airflow = new URL("/", location.href).href;
document.head.append(base);
const asked = [];
const all = tasks.map(([kind, pipeline], n) => ({
  id: `id${n}`, dag_id: "d", dag_run_id: "r", task_id: `t${n}`, map_index: -1,
  trigger: { classpath: `a.module.${kind}` }, rendered_fields: kind === "FreshnessTrigger" ? { pipeline } : {},
}));
window.fetch = async (address) => {
  const { pathname, searchParams } = new URL(address);
  asked.push(pathname);
  if (pathname.endsWith("/taskInstances")) {
    const first = Number(searchParams.get("offset") ?? 0);
    const some = all.slice(first, first + Math.min(50, Number(searchParams.get("limit"))));
    return Response.json({ task_instances: some, total_entries: all.length });
  }
  const [, n] = pathname.match(/t(\\d+)\\/xcomEntries/);
  most = Math.max(most, ++open);
  await new Promise((resolve) => setTimeout(resolve));
  open--;
  return tasks[n][1] ? Response.json({ value: { pipeline: tasks[n][1] } }) : new Response("{}", { status: 404 });
};
let now = Date.now(), open = 0, most = 0;
Date.now = () => now;
const { waitingSensors } = await import(new URL("airflow.js", location.href));
const found = async () => (await waitingSensors("/etc/headwater/shop.yaml")).map((task) => Number(task.id.slice(2)));
const count = (part) => asked.filter((path) => path.includes(part)).length;
const first = await found(), again = await found(), xcoms = count("xcom"), lists = count("/~/taskInstances");
now += 40e3;
await found();
const later = count("xcom");
now += 100e3;
await found();
return { first, again, xcoms, lists, later, last: count("xcom"), lists_then: count("/~/taskInstances"), most };
"""


def test_every_sensor_that_waits_is_found_wherever_its_worker_has_the_file(browser: Browser, files: str) -> None:
    tasks = [["TimeTrigger", "/etc/headwater/shop.yaml"]] * 120
    for path in ("/etc/headwater/shop.yaml", "shop.yaml", "../pipelines/shop.yaml", "/mnt/shop.yaml"):
        tasks += [["FreshnessTrigger", path], ["SensorTrigger", path]]
    tasks += [["FreshnessTrigger", "/etc/headwater/workshop.yaml"], ["SensorTrigger", "/etc/headwater/bank.yaml"]]
    browser.open(files)
    found = browser.script(f"return (async function () {{{SENSORS}}})(...arguments)", tasks)
    of_shop = list(range(120, 128))
    assert (found["first"], found["again"], found["xcoms"]) == (of_shop, of_shop, 5)
    assert (found["lists"], found["lists_then"]) == (3, 9), "not read again at each refresh"


def test_a_sensor_whose_lake_was_not_looked_at_yet_is_asked_for_seldom(browser: Browser, files: str) -> None:
    """It has nothing to show. Many of them are asked a few at a time: the page's other requests go by the same way."""
    browser.open(files)
    found = browser.script(f"return (async function () {{{SENSORS}}})(...arguments)", [["SensorTrigger", ""]] * 40)
    assert (found["first"], found["xcoms"], found["later"], found["last"]) == ([], 40, 40, 80)
    assert found["most"] <= 6
