"""Gives a driver its Airflow connection anew, when the source refuses the password that it was started with.

The task, which lives as long as its driver, answers at a socket in a folder of its own that only its user may enter.
What it answers it fetches then; nothing is stored.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator

from headwater.pipeline_file.values import CONNECTION_SOCKET
from headwater_airflow.hooks.source import connection_uri

log = logging.getLogger(__name__)


@contextlib.contextmanager
def answering(conn_id: str) -> Iterator[dict[str, str]]:
    """What a driver's environment needs to ask for the connection `conn_id` while the block lasts. Empty where no such
    socket can be made; a driver then has what it was started with."""
    with tempfile.TemporaryDirectory(prefix="headwater_") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = os.path.join(folder, "connection")
        try:
            listener.bind(path)
        except OSError as error:  # a folder for temporary files with a long name
            log.info("the driver cannot ask for the connection again: %s", error)
            yield {}
            return
        listener.listen()
        thread = threading.Thread(
            target=_answer_all, args=(listener, conn_id), name="headwater-connection", daemon=True
        )
        thread.start()
        try:
            yield {CONNECTION_SOCKET: path}
        finally:
            listener.shutdown(socket.SHUT_RDWR)  # which ends the waiting for the next one
            thread.join(5)


def _answer_all(listener: socket.socket, conn_id: str) -> None:
    while True:
        try:
            asking, _ = listener.accept()
        except OSError:
            return
        with asking:
            try:
                asking.sendall(connection_uri(conn_id).encode())
            except Exception as error:  # Airflow's, or of who has gone away: the driver goes on with what it has
                log.warning("the connection %s could not be given again: %s", conn_id, type(error).__name__)
