"""Named points where tests make a job fail, hold or die. In production every one of them is a dictionary look-up.

`HEADWATER_FAILPOINT=name[@what][:n][=action]`, several separated by `;`: at the n-th time (default 1) the point is
reached (for the table `what`, if it is named), do `kill` (default; SIGKILL to this process), `fail` (raise), or
`hold:FILE` (create FILE.held and wait until FILE is there).
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Final

NAMES: Final = (
    "load.after_publication",
    "load.after_capture",
    "load.before_commit",
    "load.after_stretches",
    "load.after_ordering",
    "load.after_commit",
    "load.after_registry",
    "reload.after_answer",
    "reload.after_capture",
    "reload.after_read",
    "reload.after_handover",
    "replicate.after_generation",
    "replicate.before_chunk",
    "replicate.after_history_commit",
    "replicate.before_evolution",
    "replicate.before_rebuild",
    "replicate.after_rebuild",
    "replicate.after_evolution",
    "replicate.before_table_commit",
    "replicate.after_table_commit",
    "replicate.after_all_tables",
    "replicate.before_ledger",
    "replicate.after_ledger",
    "replicate.after_position_file",
    "replicate.before_confirm",
    "replicate.after_confirm",
    "replicate.after_kept_share",
    "replicate.before_round",
    "replicate.before_part",
    "replicate.before_ready_commit",
    "replicate.after_part_commit",
    "replicate.after_part_answer",
    "replicate.before_release",
    "adopt.suspended",
    "adopt.slot",
    "adopt.ledger",
    "take_over.announced",
    "take_over.warm",
    "take_over.slot_is_free",
)

_reached: dict[str, int] = {}
_lock = threading.Lock()


class InjectedFailure(Exception):
    """What `fail` raises."""


def reach(name: str, what: str = "") -> None:
    """The job is at the point `name`, with the table `what`."""
    setting = os.environ.get("HEADWATER_FAILPOINT")
    if not setting:
        return
    if name not in NAMES:
        raise ValueError(f"{name!r} is not a failpoint")
    for part in setting.split(";"):
        target, _, action = part.partition("=")
        target, _, nth = target.partition(":")
        if target not in (name, f"{name}@{what}"):
            continue
        with _lock:
            _reached[target] = _reached.get(target, 0) + 1
            due = _reached[target] == int(nth or 1)
        if due:
            _act(name, action or "kill")


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "fail":
        raise InjectedFailure(name)
    elif action.startswith("hold:"):
        path = Path(action[len("hold:") :])
        path.with_name(path.name + ".held").touch()
        while not path.exists():
            threading.Event().wait(0.02)
    else:
        raise ValueError(f"{action!r} is not an action of a failpoint")
