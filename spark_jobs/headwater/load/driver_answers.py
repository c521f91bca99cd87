"""What a job hears from the driver that runs beside it: that it is there, that it keeps a table's changes, and at last
what has become of a reload."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from headwater.errors import Transient
from headwater.lake.looks import Growing, often
from headwater.lake.position_file import read_position_file
from headwater.lake.registry import Registry, TableRecord
from headwater.lake.reload_records import Keeping, load_name
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection
from headwater.source.slot import read_slot

log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 60.0
_ABSENT_SECONDS: Final = 30.0


def is_running(connection: Connection, pipeline: Pipeline) -> bool:
    """Whether a driver holds the slot."""
    slot = read_slot(connection, pipeline.source.slot)
    return slot is not None and slot.is_read


def await_keeping(connection: Connection, pipeline: Pipeline, registry: Registry, record: TableRecord) -> bool:
    """Whether a driver runs, and keeps the changes of the table `record`, which is being loaded, from now on. Transient
    when it cannot."""
    answer = await_answer(connection, pipeline, registry, load_name(record), f"the load of {record.name}", absent=0.0)
    if answer is not None and answer.state == "failed":
        raise Transient(
            f"the running replicate does not keep the changes of {record.name}: {answer.reason}",
            code="no_answer",
            where=f"pipeline {pipeline.name}",
            remedy="start replicate again with the pipeline file and the environment of this load, then load again",
        )
    return answer is not None


def await_answer(
    connection: Connection,
    pipeline: Pipeline,
    registry: Registry,
    name: str,
    what: str,
    wanted: Callable[[Keeping], bool] = lambda answer: True,
    *,
    seconds: float = _ANSWER_SECONDS,
    absent: float = _ABSENT_SECONDS,
    meanwhile: Callable[[], None] = lambda: None,
) -> Keeping | None:
    """The driver's answer under `name`, as soon as it is `wanted`; `what` is asked for, in words.

    None when no driver has run for `absent` seconds: one may hand over to the next. Transient when one runs and neither
    answers nor shows a sign of life for `seconds`: the table's lane may have much to do before. `meanwhile` is called
    about once a second.
    """
    deadline, said = time.monotonic() + seconds, read_position_file(pipeline.lake_path())
    looks = Growing(*often(pipeline.lake_path()).wait)
    looked = seen = time.monotonic()
    while True:
        looks.looked(new=registry.refresh())
        answer = registry.kept.get(name)
        if answer is not None and wanted(answer):
            return answer
        now = time.monotonic()
        if now - looked > 1.0 or not absent:
            looked = now
            meanwhile()
            if is_running(connection, pipeline):
                seen = now
            elif now - seen >= absent:
                return None
        if now > deadline:
            before, said = said, read_position_file(pipeline.lake_path())
            if said == before:
                raise Transient(
                    f"the running replicate has shown no sign of life for {seconds:.0f} s: {what} did not begin",
                    code="no_answer",
                    where=f"pipeline {pipeline.name}",
                    remedy="look at its log: it stands still",
                )
            deadline = now + seconds
            log.info("the running replicate has not answered yet, and is at work: %s waits for it", what)
        time.sleep(looks.pause)
