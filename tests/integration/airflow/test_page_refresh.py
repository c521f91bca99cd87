"""What somebody does on a page while it is built anew, in a real browser: focus and text stay where they are."""

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
