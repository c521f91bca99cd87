"""How far loads and reloads are: `<root>/_headwater/loads/<name>.json`, one for each job that runs, replaced by it
about once a second and removed at its end. One that a killed job has left names a session that is gone.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from headwater.delta import storage
from headwater.lake.paths import loads_path

LoadFile = dict[str, Any]
"""What is shown of the job (docs/reference/json.md, `loads`), and `session`: its application_name at the source."""


def write_load_file(root: str, name: str, content: LoadFile) -> None:
    path = loads_path(root, name)
    storage.make_folder(loads_path(root))
    storage.replace(path, json.dumps(content).encode())


def remove_load_file(root: str, name: str) -> None:
    storage.delete(loads_path(root, name))


def read_load_files(root: str) -> dict[str, LoadFile]:
    """By name, those of jobs that are gone included."""
    found = {}
    for file in sorted(storage.names(loads_path(root))):
        name = file.removesuffix(".json")
        if name == file:
            continue  # it is being replaced
        try:
            found[name] = json.loads(storage.read_text(loads_path(root, name)))
        except FileNotFoundError:  # it has just ended
            continue
        except ValueError:  # what a power cut has left of a job's
            found[name] = {"session": ""}
    return found


def shown_loads(root: str, alive: Collection[str]) -> list[dict[str, Any]]:
    """How far the loads and reloads are that run just now; `alive`: sessions at the source, where no killed job is."""
    running = [file for file in read_load_files(root).values() if file["session"] in alive]
    return [{key: value for key, value in file.items() if key != "session"} for file in running]
