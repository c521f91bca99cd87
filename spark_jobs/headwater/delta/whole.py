"""Whether a version of a Delta table has all its files, and which files its actions name."""

from __future__ import annotations

import os.path
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlparse

from headwater.delta import storage
from headwater.delta.deletion_vectors import vector_file
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import TornEntry
from headwater.lake_root import is_remote


def is_whole(folder: str, version: int) -> bool:
    """Whether every file of `version` is still there, as its log says: the log reaches further back than the files do.
    Also true where the log cannot be read here, which is for the reader's own engine to say."""
    try:
        return not lost_file(folder, version)
    except (FileNotFoundError, KeyError, TornEntry):
        return True


def lost_file(folder: str, version: int | None = None) -> str:
    """The first file of `version` (None: the newest) that is missing, or has another size than the log says; nothing:
    none. Errors as of `read_snapshot`."""
    named, sizes = Named(), {}
    for file in read_snapshot(folder, version).files.values():
        named.take({"path": file.name, "deletionVector": file.vector})
        sizes[os.path.relpath(file.in_folder(folder), folder)] = file.size
    wanted = sorted(named.below(folder))
    # In a store by one list, which, unlike a look at each, no proxy answers for a store that is away.
    listed = {one.path: one.size for one in storage.files_below(folder, bool)} if is_remote(folder) and wanted else None
    for path in wanted:
        try:
            found = storage.info(os.path.join(folder, path)).size if listed is None else listed[path]
        except (FileNotFoundError, KeyError):
            return f"{os.path.join(folder, path)} is missing"
        if found != sizes.get(path, found):
            return f"{os.path.join(folder, path)} has {found} bytes, and the log says {sizes[path]}"
    return ""


@dataclass(slots=True)
class Named:
    """Files as actions name them, each once: a data file comes back with every new vector, a vectors' file with each of
    its vectors."""

    paths: set[str] = field(default_factory=set)
    vectors: set[tuple[str, str]] = field(default_factory=set)

    def take(self, file: dict[str, Any]) -> None:
        self.paths.add(file["path"])
        vector = file.get("deletionVector")
        if vector and vector["storageType"] != "i":
            self.vectors.add((vector["storageType"], vector["pathOrInlineDv"]))

    def below(self, folder: str) -> set[str]:
        """Their paths below the folder; files elsewhere are not this table's."""
        # An absolute path stays what it is.
        whole = [os.path.join(folder, unquote(urlparse(path).path)) for path in self.paths]
        whole += [
            path for s, p in self.vectors if (path := vector_file(folder, {"storageType": s, "pathOrInlineDv": p}))
        ]
        return {path for path in (os.path.relpath(path, folder) for path in whole) if not path.startswith("../")}
