"""Results of commands for a person, made from the same object that `--json` prints: one table per command that fits the
terminal. What is said in sentences (reasons, remedies) stands below it, where it is neither cut nor folded."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from headwater.pipeline_file.quantities import seconds_text, size_text
from headwater.terminal.status_screen import grid, status_screen

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULT_ROLE = "headwater"
_COLUMNS = {
    "init": ("size", "rows", "identity", "text in the lake"),
    "load": ("state", "rows", "bytes", "seconds", "capture_lsn"),
    "reload": (
        *("state", "rows", "replaced_rows", "bytes", "seconds", "capture_lsn"),
        *("missing", "extra", "different", "unsettled"),
    ),
    "rebuild": ("state", "read_from", "rows", "replaced_rows", "bytes", "seconds"),
    "replicate": ("state", "changes"),
    "pause": ("state",),
    "resume": ("state",),
    "wait": ("state", "version", "applied_lsn", "gap_bytes"),
    "maintain": (
        "files_before",
        "files_after",
        "files_removed",
        "bytes_removed",
        "log_entries_removed",
        "checkpoint",
        "horizon",
    ),
    "validate": ("success", "rows", "mode", "state"),
    "waits": ("runs", "satisfied", "p50", "p95", "longest", "last", "last_at"),
    "verify": ("rows", "missing", "extra", "different", "repaired"),
}
_WHERE_ANY = {"verify": ("unsettled", "more")}
"""Columns that are shown where a table has a number other than 0 in them."""
_HEADINGS = {
    "capture_lsn": "read at",
    "gap_bytes": "bytes behind",
    "applied_lsn": "applied up to",
    "more": "not looked at",
}
_SENTENCES = {
    "init": ("reason", "remedy", "notes"),
    "reload": ("reasons", "reason", "not_repaired", "written_anew"),
    "rebuild": ("changed",),
    "wait": ("reason",),
    "maintain": ("kept_for", "skipped", "error"),
    "validate": ("failed", "keys", "reason"),
    "verify": ("not_compared", "written_anew", "not_repaired", "keys"),
}


def render(command: str, result: dict[str, Any], out: TextIO, *, verbose: bool = False) -> None:
    """Writes `result` of `command` to `out`. `verbose`: more than fits a screen, where the command knows it."""
    console = console_on(out)
    if command == "status":
        _render_status(console, result, verbose=verbose)
    elif command == "check":
        _render_check(console, result)
    elif command == "init":
        _render_init(console, result)
    elif command == "doctor":
        _render_doctor(console, result)
    else:
        _render_tables(console, command, result)


def console_on(out: TextIO) -> Console:
    from rich.console import Console

    class PipedConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # as of any other output: Rich would end the process with 1, as if we had failed

    # Into a file or pipe nothing is cut or folded: there is no width to respect.
    return PipedConsole(file=out, highlight=False, markup=False, emoji=False, width=None if out.isatty() else 1000)


def _render_status(console: Console, result: Mapping[str, Any], *, verbose: bool) -> None:
    from rich.text import Text

    for part in status_screen(result, verbose=verbose, size=console.size if console.is_terminal else None):
        console.print(part, soft_wrap=isinstance(part, Text))


def _render_tables(console: Any, command: str, result: dict[str, Any]) -> None:
    tables = result.get("tables") or {}
    if command in _HEADLINES:
        for sentence in _HEADLINES[command](result):
            console.print(sentence, soft_wrap=True)
    if command == "verify":
        tables = {name: table if table["compared"] else _not_compared(table) for name, table in tables.items()}
    rare = [column for column in _WHERE_ANY.get(command, ()) if any(table.get(column) for table in tables.values())]
    _grid(console, "table", tables, (*_COLUMNS.get(command, ()), *rare))
    _sentences(console, tables, _SENTENCES.get(command, ()))
    _grid(console, "wait", {_wait_of(one): one for one in result.get("waits", ())}, _COLUMNS["waits"])
    for key, value in result.items():
        if key not in ("tables", "waits", *_IN_HEADLINES.get(command, ())) and value not in (None, {}):
            console.print(f"{key}: {_cell(value)}", soft_wrap=True)


def _wait_headline(result: Mapping[str, Any]) -> list[str]:
    waited = seconds_text(result["waited_seconds"])
    if result["outcome"] == "satisfied":
        return [f"Fresh after {waited}: epoch {result['epoch']} holds everything up to {result['target']}."]
    sentence = f"Not fresh after {waited} ({result['outcome'].replace('_', ' ')}): {result['reason']}."
    return [sentence, *([f"  what to do: {result['remedy']}"] if result["remedy"] else [])]


_ENDS = {
    "until": "Done",
    "seconds": "Ended after its --max-seconds",
    "signal": "Stopped as it was asked to",
    "paused": "Ended, since the pipeline is paused",
    "fenced": "Ended, since a newer driver goes on",
}


def _loaded(result: Mapping[str, Any]) -> list[str]:
    skipped, tables = result["skipped"], result["tables"]
    if len(skipped) == len(tables):
        return [f"Nothing to load: {_are(len(skipped))} loaded already. With --again they are loaded once more."]
    new = [table for name, table in tables.items() if name not in skipped]
    done = [table["rows"] for table in new if table["state"] != "suspended"]
    failed = f"; {_are(len(new) - len(done))} suspended" if len(done) < len(new) else ""
    before = f"; {_are(len(skipped))} loaded already" if skipped else ""
    took = seconds_text(result["seconds"])
    return [f"Loaded {_tables(len(done))} with {sum(done):,} rows in {took}{failed}{before}."]


def _tables(number: int) -> str:
    return "1 table" if number == 1 else f"{number:,} tables"


def _are(number: int) -> str:
    return f"{_tables(number)} {'is' if number == 1 else 'are'}"


def _replicated(result: Mapping[str, Any]) -> list[str]:
    ended = _ENDS.get(result["stopped_by"], result["stopped_by"])
    position = f"; the lake holds everything up to {result['position']['lsn']}" if result["position"] else ""
    by = "; another driver has taken over" if result["handed_over"] else ""
    counts = f"{result['changes']:,} changes of {result['transactions']:,} transactions in {result['epochs']:,} epochs"
    return [f"{ended}: {counts}{position}{by}."]


def _done(result: Mapping[str, Any]) -> list[str]:
    return [f"{result['done']}.", f"  next: {result['next']}"]


def _dropped(result: Mapping[str, Any]) -> list[str]:
    gone, kept = result["dropped"], result["kept"]
    why = "it was not made for this pipeline, or the role does not own it"
    others = f" {', '.join(kept)} stays: {why}." if kept else ""
    return [f"Dropped at the source: {', '.join(gone) or 'nothing, since nothing was left'}. The lake stays.{others}"]


_HEADLINES: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "load": _loaded,
    "replicate": _replicated,
    "wait": _wait_headline,
    "pause": _done,
    "resume": _done,
    "drop": _dropped,
}
_IN_HEADLINES = {
    "load": ("skipped", "seconds"),
    "replicate": ("epochs", "transactions", "changes", "position", "stopped_by", "handed_over"),
    "wait": ("outcome", "reason", "remedy", "waited_seconds", "progress", "eta_seconds", "error"),
    "pause": ("paused", "done", "next"),
    "resume": ("paused", "done", "next"),
    "drop": ("dropped", "kept"),
}
"""What the headlines say already."""


def _not_compared(table: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of what was not looked at would read as if nothing differed."""
    return {"not_compared": f"it is {table['state']}{f': {reason}' if (reason := table['reason']) else ''}"}


def _render_check(console: Any, result: dict[str, Any]) -> None:
    if "sql" in result:
        console.file.write(result["sql"])  # not one character of it is to be changed
        return
    for problem in result["problems"]:
        where = f"{problem['where']}: " if problem["where"] else ""
        console.print(f"{problem['severity']}: {where}{problem['message']} [{problem['code']}]", soft_wrap=True)
        if problem["remedy"]:
            console.print(f"  what to do: {problem['remedy']}", soft_wrap=True)
    console.print("ready" if result["ok"] else "not ready")


def _wait_of(one: dict[str, Any]) -> str:
    return f"{one['who']}: {one['requirement']} of {', '.join(one['tables']) or 'all tables'}"


def _render_init(console: Any, result: dict[str, Any]) -> None:
    """The tables, what the source still needs, and what comes next; each as far as `result` has it."""
    tables = {
        name: {**table, "size": size_text(table["bytes"]), "text in the lake": ", ".join(table["as_text"])}
        for name, table in result.get("tables", {}).items()
    }
    _grid(console, "table", tables, _COLUMNS["init"])
    for name, table in tables.items():
        for column, why in table["as_text"].items():
            console.print(f"{name}: {column} is text in the lake, since it is {why}", soft_wrap=True)
    _sentences(console, tables, _SENTENCES["init"])
    if any(table["may_not_fit"] for table in tables.values()):
        console.print(
            "Values that a date, time, decimal or array of the lake cannot hold (infinity, NaN, two dimensions) suspend"
            " their table, unless on_bad_value says otherwise.",
            soft_wrap=True,
        )
    if "sql" in result:
        console.file.write(result["sql"])  # not one character of it is to be changed
    if result.get("file"):
        file, role = shlex.quote(result["file"]), result["role"]
        again = f"headwater init {file} --sql" + (f" --role {shlex.quote(role)}" if role != _DEFAULT_ROLE else "")
        console.print(f"\nWritten: {result['file']}", soft_wrap=True)
        console.print(f"Next, when the SQL above has been run ({again} prints it again):", soft_wrap=True)
        console.print(
            f"  export HEADWATER_SOURCE={shlex.quote(result['source'])}   # with the password", soft_wrap=True
        )
        for command in ("check", "load", "replicate"):
            console.print(f"  headwater {command} {file}", soft_wrap=True)


def _render_doctor(console: Any, result: dict[str, Any]) -> None:
    """What to do first, then what is in order, then the positions side by side."""
    for number, finding in enumerate(result["findings"], 1):
        where = f"{finding['where']}: " if finding["where"] else ""
        console.print(
            f"{number}. {finding['severity']}: {where}{finding['message']} [{finding['code']}]", soft_wrap=True
        )
        console.print(f"   evidence: {finding['evidence']}", soft_wrap=True)
        if finding["remedy"]:
            console.print(f"   what to do: {finding['remedy']}", soft_wrap=True)
    for sentence in result["in_order"]:
        console.print(f"OK: {sentence}", soft_wrap=True)
    positions = result["positions"]
    source, slot, ledger = positions["source"] or {}, positions["slot"] or {}, positions["ledger"] or {}
    points = {
        "the source's log ends at": source.get("lsn"),
        "read from the log up to": positions["read_lsn"],
        f"ledger, epoch {ledger.get('epoch')} of generation {ledger.get('generation')}": ledger.get("lsn"),
        "slot, confirmed up to": slot.get("confirmed_lsn"),
        "slot, keeps the log from": slot.get("restart_lsn"),
        **{f"applied to {name}": lsn for name, lsn in positions["applied"].items()},
    }
    known = {what: {"position": lsn} for what, lsn in points.items() if lsn}
    _grid(console, "position of", known, ["position"])
    for lease in result["leases"]:
        alive = {True: "held", False: "left behind", None: "held or left behind"}[lease["alive"]]
        console.print(
            f"lease {lease['name']}: {alive}, since {lease['since']}, host {lease['host']}, process {lease['pid']}",
            soft_wrap=True,
        )
    if not result["findings"]:
        console.print("No problem was found.")


def _grid(console: Any, first: str, rows: Mapping[str, Mapping[str, Any]], wanted: Iterable[str]) -> None:
    if rows:
        columns = list(wanted)
        headings = [_HEADINGS.get(column, column.replace("_", " ")) for column in (first, *columns)]
        cells = [[name, *(_cell(row.get(column)) for column in columns)] for name, row in rows.items()]
        console.print(grid(headings, cells))


def _sentences(console: Any, rows: Mapping[str, Mapping[str, Any]], wanted: Iterable[str]) -> None:
    for name, row in rows.items():
        for what in wanted:
            if row.get(what):
                console.print(f"{name}: {what.replace('_', ' ')}: {_cell(row[what])}", soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_cell(item) for item in value)
    return str(value)
