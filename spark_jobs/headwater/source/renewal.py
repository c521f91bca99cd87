"""The connection as whoever handed it over knows it by now: for a password that changes while this process runs.

An operator fetches an Airflow connection when its task begins, and the driver has it in its environment. The task also
answers at a socket of its own, whose path is there, too, with the connection as it is at that moment: nothing secret
lies on a disk, and nobody is asked as long as a server lets the process in.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

from headwater.pipeline_file.values import CONNECTION_SOCKET

log = logging.getLogger(__name__)

_ANSWER_SECONDS: Final = 10.0
_newest: Final[dict[str, str]] = {}


def newest(conninfo: str) -> str:
    """What has taken the place of `conninfo` in this process; itself, if nothing has."""
    return _newest.get(conninfo, conninfo)


def renewed(refused: str) -> str | None:
    """Another connection string than `refused`, with which a server that wants a password let nobody in; None: there is
    none. Whether the password is why it does not say: libpq gives no SQLSTATE there, and its text is in any language.
    """
    path = os.environ.get(CONNECTION_SOCKET)
    if path is None:
        return None
    try:
        found = _ask(path)
    except (OSError, ValueError):
        return None
    if not found or found == refused:
        return None
    log.info("no log-in at the source: Airflow's connection was fetched again")
    _newest.update({old: found for old, known in list(_newest.items()) if known == refused})
    _newest[refused] = found
    return found


def _ask(path: str) -> str:
    pieces = []
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_ANSWER_SECONDS)
        asking.connect(path)
        while piece := asking.recv(4096):
            pieces.append(piece)
    return b"".join(pieces).decode()
