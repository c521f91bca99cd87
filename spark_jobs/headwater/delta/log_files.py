"""What lies in a table's `_delta_log`: which versions have an entry or a checkpoint, how far back it can be read, and
which version was current at a moment.

Source: Delta transaction protocol, "Delta Log Entries", "Checkpoints", "Log Compaction Files", "Version Checksum
File". Times are those of the files: the file system's clock, not the writers'.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass

from headwater.delta import storage
from headwater.delta.log_entries import checkpoints_of, entries_of, log_entry, log_path

# Everything of a version begins with its number; Hadoop's own checksums have a dot before it.
_OF_A_VERSION = re.compile(r"\A\.?(\d{20})\.")
_COMPACTED = re.compile(r"\A\.?\d{20}\.(\d{20})\.compacted\.json")
_OTHER_CHECKPOINT = re.compile(r"\A\d{20}\.checkpoint\.[0-9a-f]{8}-[0-9a-f-]{27}\.(?:json|parquet)\Z")
_SCRATCH = re.compile(r"\A\..*\.tmp(?:\.crc)?\Z")


class UnknownLog(Exception):
    """The log is kept in a form that is not known here: it is left alone."""


@dataclass(frozen=True, slots=True)
class LogFiles:
    """One look at the log of the table in `folder`."""

    folder: str
    entries: list[int]
    checkpoints: list[int]
    names: list[tuple[int, str]]
    scratch: list[str]

    @property
    def newest(self) -> int:
        return self.entries[-1]

    @property
    def oldest_readable(self) -> int:
        """The oldest version that the log still tells whole."""
        if self.entries[0] == 0:
            return 0
        # An entry alone says what changed, not what was there before.
        return min((c for c in self.checkpoints if c >= self.entries[0] - 1), default=self.newest)

    def current_at(self, moment: float) -> int:
        """The newest version that existed at `moment` (seconds since 1970), or the oldest one there is."""
        later = bisect_right(
            self.entries, moment, key=lambda version: storage.info(log_entry(self.folder, version)).modified
        )
        return self.entries[max(later - 1, 0)]

    def before(self, version: int) -> list[str]:
        """Names of what belongs to versions below `version`, oldest first: what is left always reads on to the end."""
        return [name for number, name in self.names if number < version]


def look(folder: str) -> LogFiles:
    """The log as it is now. FileNotFoundError when there is none, UnknownLog when its checkpoints keep their content
    elsewhere."""
    found_names = storage.names(log_path(folder))
    entries = entries_of(found_names)
    if any(map(_OTHER_CHECKPOINT.match, found_names)):
        raise UnknownLog("its checkpoints are of the second version, whose files lie elsewhere")
    names = by_version(found_names)
    known = {name for _, name in names}
    scratch = [name for name in found_names if name not in known and _SCRATCH.match(name)]
    if not entries:
        raise FileNotFoundError(f"{folder} has no log")
    return LogFiles(folder, entries, sorted(checkpoints_of(folder, found_names)), names, scratch)


def by_version(names: list[str]) -> list[tuple[int, str]]:
    """Of what lies in a log, all that belongs to a version, in order: entries, checkpoints, checksums."""
    found = ((name, _COMPACTED.match(name) or _OF_A_VERSION.match(name)) for name in names)
    return sorted((int(match[1]), name) for name, match in found if match is not None)


def pointed_at(folder: str) -> int | None:
    """The checkpoint that `_last_checkpoint` names: readers begin there. None: there is no such file, or it is damaged,
    and readers look for themselves."""
    try:
        return int(json.loads(storage.read_text(log_path(folder, "_last_checkpoint")))["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
