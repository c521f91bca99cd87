"""Where everything lies below a lake's root. Paths only; nothing is opened here."""

from __future__ import annotations

from pathlib import Path

CONTROL = "_headwater"


def ledger_path(root: str) -> str:
    return str(Path(root) / CONTROL / "ledger")


def registry_path(root: str) -> str:
    return str(Path(root) / CONTROL / "tables")


def pins_path(root: str) -> str:
    return str(Path(root) / CONTROL / "pins")


def staged_path(root: str) -> str:
    """Below it a folder for each generation, in that one for each open transaction: see `headwater.lake.staging`."""
    return str(Path(root) / CONTROL / "staged")


def position_file_path(root: str) -> str:
    return str(Path(root) / CONTROL / "position.json")


def table_path(root: str, relative: str) -> str:
    """`relative` is `TableName.path`: `<schema>/<table>`, already escaped."""
    return str(Path(root) / relative)


def table_uri(root: str, relative: str) -> str:
    """The path as the URI that cuts carry."""
    return Path(table_path(root, relative)).as_uri()
