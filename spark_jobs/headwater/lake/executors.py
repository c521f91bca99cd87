"""Executors that are no part of the driver's process: what they need of it, and what it means when they lack something.

The engine travels with the job, so theirs is the driver's own version. A Python of the driver's minor version, with
pyarrow, numpy, pandas, psycopg, deltalake and pyroaring, and the lake's folder under the same path are for whoever sets
up the cluster.
"""

from __future__ import annotations

import os
import re
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headwater import store_options
from headwater.delta import storage
from headwater.errors import Refused, Transient
from headwater.lake.paths import registry_path
from headwater.lake_root import is_remote
from headwater.spark.stores import no_commit
from headwater.store_options import StoreOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NO_FOLDER = "HEADWATER_NO_FOLDER"
_ENGINE = "headwater-engine.zip"
_OF_STORE = re.compile(r"Error: \[Errno \d+\] (.*): '(\w+://[^']*)'")
"""An OSError of `headwater.delta.storage`, as its text."""
_sharing = threading.Lock()  # tables are loaded side by side, and half an archive would be shared


def share_engine(spark: SparkSession) -> None:
    """From now on tasks of this application import this process's Headwater, whatever is installed where they run."""
    context = spark.sparkContext
    if (context.master or "").startswith("local"):
        return
    with _sharing:
        if any(uri.endswith(f"/{_ENGINE}") for uri in context.listFiles):
            return
        package = Path(__file__).resolve().parents[1]
        assert context._temp_dir is not None  # the context's own, which goes with it
        archive = os.path.join(context._temp_dir, _ENGINE)
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as engine:
            for file in sorted(package.rglob("*.py")):
                engine.write(file, file.relative_to(package.parent))
        context.addPyFile(archive)


@dataclass(frozen=True, slots=True)
class LakeAccess:
    """What a task needs to write below `root`, wherever it runs. `options`: of the store that it is in; secret."""

    root: str
    options: StoreOptions | None

    @classmethod
    def to(cls, root: str) -> LakeAccess:
        return cls(root, store_options.of(root) if is_remote(root) else None)

    def enter(self) -> None:
        """Before the task writes. FileNotFoundError where the lake is not seen: what was written there would be lost
        without an error. A store that is away is waited for as by the job that the task is of."""
        if self.options is not None:
            store_options.register(self.root, self.options)
            store_options.be_patient()
        here = registry_path(self.root)
        if not storage.is_folder(here):
            raise FileNotFoundError(f"{NO_FOLDER}: {here}")


def refuse_engine(place: str, table: str, why: str) -> None:
    """Refused in an object store, for what only Spark could commit."""
    if said := no_commit(place, table, why):
        raise Refused(**said)


def lacking(text: str) -> Refused | Transient | None:
    """The error that a Spark exception's text tells of, when it comes of how the executors were set up, or of the store
    that their tasks write to."""
    if NO_FOLDER in text:
        where = text.split(f"{NO_FOLDER}: ", 1)[1].splitlines()[0].rstrip("'\"")
        message = "an executor does not see the lake's folder: what it wrote would be on its own disk"
        remedy = "mount the lake on every worker under the same path, then run the command again"
        if is_remote(where):
            message = "an executor finds nothing of the lake in the store that it reaches"
            remedy = "let every worker reach the store that the driver reaches, then run the command again"
        return Refused(message, code="lake_not_shared", where=where, remedy=remedy)
    if (away := _OF_STORE.search(text)) is not None:
        return Transient(
            f"the lake's store does not do what a task of Spark asks: {away[1]}",
            code="lake_unavailable",
            where=away[2],
            remedy="see whether every worker reaches it with the keys that the driver has, then run the command again: "
            "nothing is lost",
        )
    for sign in ("ModuleNotFoundError: ", "PYTHON_VERSION_MISMATCH", "Cannot run program "):
        if sign in text:
            said = text[text.index(sign) :].splitlines()[0]
            return Refused(
                f"the Python of an executor cannot run a task: {said}",
                code="executor_python",
                remedy="install there what docs/deployment.md lists, under Python of the driver's minor version, and "
                "name it by HEADWATER_EXECUTOR_PYTHON where its path is another one",
            )
    return None
