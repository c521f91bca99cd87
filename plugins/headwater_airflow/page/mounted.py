"""The app as the plugin registers it: made at the first request.

Every component of Airflow imports its plugins, schedulers and workers too; only the API server serves pages, and only
it shall pay for them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

PREFIX: Final = "/headwater"
"""Where the app is mounted, below Airflow's own root."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class MountedApp:
    """An ASGI app that becomes `headwater_airflow.page.app` when it is asked first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._app: Any = None

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if self._app is None:
            await asyncio.to_thread(self._make)  # imports take a while, and others are served by this loop
        await self._app(scope, receive, send)

    def _make(self) -> None:
        from headwater_airflow.hooks.store import fetch_in_server
        from headwater_airflow.page.app import create_app

        fetch_in_server()
        with self._lock:
            if self._app is None:
                self._app = create_app()
