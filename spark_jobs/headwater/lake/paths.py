"""Where everything lies below a lake's root. Paths only; nothing is opened here."""

from __future__ import annotations

import time
import uuid
from os.path import join

from headwater.delta.storage import uri_of

CONTROL = "_headwater"


def control_path(root: str) -> str:
    return join(root, CONTROL)


def ledger_path(root: str) -> str:
    return join(root, CONTROL, "ledger")


def registry_path(root: str) -> str:
    return join(root, CONTROL, "tables")


def pins_path(root: str) -> str:
    return join(root, CONTROL, "pins")


def waits_path(root: str) -> str:
    return join(root, CONTROL, "waits")


def staged_path(root: str) -> str:
    """Below it a folder for each generation, in that one for each open transaction: see
    `headwater.apply.staged.files`."""
    return join(root, CONTROL, "staged")


_KEYS = "keys-"


def key_scratch(root: str) -> str:
    """A folder among what is staged that nobody knows yet: see `headwater.apply.file_keys`."""
    return join(staged_path(root), f"{_KEYS}{int(time.time())}-{uuid.uuid4()}")


def key_scratch_made(name: str) -> int | None:
    """When the folder `name` of `staged_path` was made by `key_scratch`, in seconds since 1970; None: it was not."""
    return int(name.removeprefix(_KEYS).partition("-")[0]) if name.startswith(_KEYS) else None


def kept_path(root: str, name: str) -> str:
    """What a driver keeps for the reload or load `name`: see `headwater.replicate.tables.keeper`."""
    return join(root, CONTROL, "kept", name)


def reloaded_path(root: str, name: str) -> str:
    """The rows that the reload `name` has read at the source: see `headwater.apply.replacement`."""
    return join(root, CONTROL, "reloaded", name)


def loads_path(root: str, name: str = "") -> str:
    """How far the load or reload `name` is: see `headwater.lake.load_files`."""
    return join(root, CONTROL, "loads", f"{name}.json") if name else join(root, CONTROL, "loads")


def stretches_path(root: str, table: str, load: str = "") -> str:
    """What loads of the table (`TableName.path`) have written and not committed: see `headwater.load.stretch_notes`."""
    return join(root, CONTROL, "stretches", table, load)


def probe_path(root: str, name: str) -> str:
    """A file that is only written to see whether one can be: see `headwater.replicate.batches.retries`."""
    return join(root, CONTROL, f"probe.{name}.tmp")


def validations_path(root: str) -> str:
    return join(root, CONTROL, "validations")


def validation_pages_path(root: str) -> str:
    return join(root, CONTROL, "validation_pages")


def changed_path(root: str) -> str:
    """Below it a folder for each reading of changed rows, while it lasts: see `headwater.validate.changed_rows`."""
    return join(root, CONTROL, "changed")


def source_counts_path(root: str) -> str:
    return join(root, CONTROL, "source_counts.json")


def damaged_path(root: str, relative: str) -> str:
    """Where the damaged table at `relative` is set aside: see `headwater.gate.recovery`."""
    return join(root, CONTROL, "damaged", relative)


def position_file_path(root: str) -> str:
    return join(root, CONTROL, "position.json")


def table_path(root: str, relative: str) -> str:
    """`relative` is `TableName.path`: `<schema>/<table>`, already escaped."""
    return join(root, relative)


def table_uri(root: str, relative: str) -> str:
    """The path as the URI that cuts carry."""
    return uri_of(table_path(root, relative))
