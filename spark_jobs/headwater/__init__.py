"""Headwater keeps a Delta lake in step with a PostgreSQL database.

The public surface, loaded on first use, so that importing a part of the package does not pay for the others:

    cut = headwater.wait("pipeline.yaml", tables=["public.orders"], require="now")
    cuts = headwater.wait_all(["shop.yaml", "crm.yaml"])   # of several pipelines
    tables = headwater.read(spark, cut)
    orders = headwater.scan(cut, "public.orders")         # the same without Spark, as Arrow
    changes = headwater.history(spark, cut, "public.orders")   # of a table with `history: true`
    views = headwater.views(spark, "pipeline.yaml")       # of all tables at the newest epoch, for plain readers
    headwater.drop_views(spark, views.values())           # and let go of what they kept
    tables = headwater.register(spark, "pipeline.yaml")   # in the session's catalog, under their names
    position = headwater.commit_position(connection)      # of one's own commit, to wait for it elsewhere
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.lake.history import history as history
    from headwater.reading.catalog_views import drop as drop_views
    from headwater.reading.newest_views import register as register
    from headwater.reading.newest_views import views as views
    from headwater.reading.read import read as read
    from headwater.reading.scan import scan as scan
    from headwater.source.samples import commit_position as commit_position
    from headwater.waiting.result import NotFresh as NotFresh
    from headwater.waiting.wait import wait_for_cut as wait
    from headwater.waiting.wait import wait_for_cuts as wait_all

__all__ = [
    "NotFresh",
    "commit_position",
    "drop_views",
    "history",
    "read",
    "register",
    "scan",
    "views",
    "wait",
    "wait_all",
]

_WHERE = {
    "NotFresh": ("headwater.waiting.result", "NotFresh"),
    "commit_position": ("headwater.source.samples", "commit_position"),
    "drop_views": ("headwater.reading.catalog_views", "drop"),
    "history": ("headwater.lake.history", "history"),
    "read": ("headwater.reading.read", "read"),
    "register": ("headwater.reading.newest_views", "register"),
    "scan": ("headwater.reading.scan", "scan"),
    "views": ("headwater.reading.newest_views", "views"),
    "wait": ("headwater.waiting.wait", "wait_for_cut"),
    "wait_all": ("headwater.waiting.wait", "wait_for_cuts"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(importlib.import_module(module), attribute)
