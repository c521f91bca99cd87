"""Compaction of a table while no driver writes it: few files, and none that is mostly deleted rows.

A directly written table is rewritten and committed as its driver would do it (`headwater.lake.upkeep`): should one
start meanwhile, whoever links the next version first has it, and the other looks again. Any other table is left to
Delta's OPTIMIZE, which rearranges rows under Delta's own conflict check. Neither changes a row (`dataChange` false).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable

from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from headwater.lake.delta_log import DataFile, Snapshot
from headwater.lake.positional import Fence
from headwater.lake.table_state import TableState
from headwater.lake.upkeep import Upkeep, choose
from headwater.schema import TableSchema

ENOUGH = 4
_SMALL = 64 << 20
_TARGET = 256 << 20
_TRIES = 3
_SIZES = {
    # Delta would take every file below a gigabyte: a table of that size would be written anew each time.
    "spark.databricks.delta.optimize.minFileSize": str(_SMALL),
    "spark.databricks.delta.optimize.maxFileSize": str(_TARGET),
}


def compact_directly(folder: str, schema: TableSchema, generation_app: str) -> bool:
    """Rewrite a directly written table's small files and deleted rows; whether anything was committed."""
    state = TableState(folder, schema)
    # No driver's generation is raised or taken back by this: the mark stays as it was found.
    fence = Fence(generation_app, state.snapshot.transactions.get(generation_app, 0))
    changed = False
    with contextlib.closing(Upkeep(fence)) as upkeep:
        while True:
            files, because = choose(list(state.snapshot.files.values()), ENOUGH)
            if not files:
                return changed
            sources = [(file, state.deleted_rows(file.name)) for file in files]
            if not upkeep.commit(folder, state, upkeep.rewrite(folder, schema, sources, because)):
                return changed
            changed = True


def worth_optimizing(files: Iterable[DataFile], enough: int) -> bool:
    """Whether some partition has `enough` small files, or some file is mostly deleted rows."""
    small: Counter[tuple[tuple[str, str | None], ...]] = Counter()
    for file in files:
        if file.rows and file.deleted * 2 > file.rows:
            return True
        small[tuple(sorted(file.partition_values.items()))] += file.size < _SMALL
    return max(small.values(), default=0) >= enough


def optimize(spark: SparkSession, snapshot: Snapshot, enough: int = ENOUGH) -> bool:
    """Delta's OPTIMIZE, if it is worth it; whether it ran. A lost race is tried again; the last one raises."""
    if not worth_optimizing(snapshot.files.values(), enough):
        return False
    session = spark.newSession()
    for name, value in _SIZES.items():
        session.conf.set(name, value)
    for left in reversed(range(_TRIES)):
        try:
            DeltaTable.forPath(session, snapshot.folder).optimize().executeCompaction()
            return True
        except Exception as error:
            if not left or ("DELTA_CONCURRENT" not in str(error) and "Concurrent" not in type(error).__name__):
                raise
    return False
