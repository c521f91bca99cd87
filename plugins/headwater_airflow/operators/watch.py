"""Notices, inside a running task, that its DAG was paused: Airflow itself only stops starting new runs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import Context

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stop_when_paused(
    context: Context, stop: Callable[[], None], poll_seconds: float = 3.0
) -> Iterator[threading.Event]:
    """Calls `stop` once if the task's DAG is paused during the block, and sets the event that the block gets; asks the
    task's API, so it needs no log-in."""
    instance, done, was_paused = context["ti"], threading.Event(), threading.Event()

    def watch() -> None:
        while not done.wait(poll_seconds):
            try:
                paused = instance.get_dag(instance.dag_id).is_paused
            except Exception as error:  # an outage of the API server must not end replication
                log.warning("cannot tell whether DAG %s is paused: %s", instance.dag_id, type(error).__name__)
                continue
            if paused:
                log.info("DAG %s was paused: stopping", instance.dag_id)
                was_paused.set()
                stop()
                return

    thread = threading.Thread(target=watch, name="headwater-pause-watch", daemon=True)
    thread.start()
    try:
        yield was_paused
    finally:
        done.set()
        thread.join()
