"""The commit of what was staged while its transaction was open: keys are looked up, files linked, nothing is written
but deletion vectors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.find_rows import DELETE_MISSED, INSERT_MET, UPDATE_MISSED, Work, examples
from headwater.apply.live_table import Added, LiveTable
from headwater.apply.plan import Plan
from headwater.apply.staged.files import StagedFile, StagedFilesGone, StagedRows
from headwater.delta import delta_log
from headwater.delta.deletion_vectors import write_vectors
from headwater.delta.delta_log import DataFile
from headwater.delta.index.codes import encode
from headwater.delta.index.index import NOWHERE

_NOTHING: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)


def link_staged(state: LiveTable, plan: Plan, staged: StagedRows, work: Work) -> tuple[list[DataFile], Iterator[Added]]:
    """Files that were written while the transaction was open: only their keys are looked up. A row that must not be
    written is one more that is gone. Returns the files as the commit names them, and with their keys."""
    look_up = plan.apply_path == "positional"
    files = [replace(file, gone=_met(state, plan, staged, file, work)) if look_up else file for file in staged.files]
    files = [file for file in files if len(file.gone) < (file.file.rows or 0)]
    if look_up:
        goes = state.find(encode(plan.record.schema, staged.removed)) if staged.removed.num_rows else _NOTHING
        missed = goes == NOWHERE
        work.diverged(int(missed.sum()), lambda: examples(DELETE_MISSED, staged.removed, missed))
        work.delete(state, goes[~missed])
    gone = {file.file.name: file.gone for file in files if file.gone}
    vectors = write_vectors(plan.path, gone) if gone else {}
    staged.link(files, plan.path)
    added = [delta_log.with_vector(file.file, vectors[file.file.name]) if file.gone else file.file for file in files]
    return added, _keyed(files, added, look_up)


def _keyed(files: list[StagedFile], added: list[DataFile], look_up: bool) -> Iterator[Added]:
    """Behind the commit nothing may fail any more: without its keys here a file is read."""
    for file, named in zip(files, added, strict=True):
        codes = None
        with contextlib.suppress(StagedFilesGone):
            codes = file.keys() if look_up else None
        yield Added(named, codes, file.gone)


def _met(state: LiveTable, plan: Plan, staged: StagedRows, file: StagedFile, work: Work) -> BitMap:
    """The rows of the staged file that are gone, once its keys have been looked up."""
    alive = np.setdiff1d(np.arange(file.file.rows or 0), np.array(file.gone, dtype=np.int64))
    stored, places = file.stored[alive], state.find(file.keys().take(alive))
    found = places != NOWHERE
    wrong = stored != found
    if wrong.any():
        keys = staged.keys_of(file, plan.record.schema).take(pa.array(alive))
        for word, which in ((UPDATE_MISSED, stored & ~found), (INSERT_MET, ~stored & found)):
            work.diverged(int(which.sum()), partial(examples, word, keys, which))
        if plan.record.on_divergence == "repair":
            wrong &= False
    work.delete(state, places[found & ~wrong])
    return file.gone | BitMap(alive[wrong].astype(np.uint32))
