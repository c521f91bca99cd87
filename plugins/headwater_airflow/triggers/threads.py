"""The threads in which a triggerer looks at lakes: a few for each pipeline file, so that a lake which hangs keeps those
of its own watchers busy, and nobody else's. A retry of a wait meets the same threads, and takes no more of them."""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

_AT_ONCE = 4
"""A tick of waits and the question beside it, the watchers of assets, a pin."""
_UNUSED_SECONDS = 3600.0
"""In a versioned bundle of DAGs a pipeline file has another path with each version, and the former one is used no
more."""
_P = ParamSpec("_P")
_T = TypeVar("_T")

_of: dict[str, ThreadPoolExecutor] = {}
_used_at: dict[str, float] = {}


async def in_thread(path: str, work: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """What `work` gives, in one of the threads of the pipeline file `path`."""
    now = time.monotonic()
    if path not in _of:
        for unused in [other for other, at in _used_at.items() if now - at > _UNUSED_SECONDS]:
            _of.pop(unused).shutdown(wait=False)
            del _used_at[unused]
        _of[path] = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="headwater lake")
    _used_at[path] = now
    call = partial(contextvars.copy_context().run, work, *arguments, **named)
    return await asyncio.get_running_loop().run_in_executor(_of[path], call)
