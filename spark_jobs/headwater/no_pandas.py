"""Processes of Headwater's own that do without pandas.

pyarrow imports pandas, for half a CPU-second, when it first makes an array of a list: only to ask whether the
list is one of pandas' own. In our processes it never is.
"""

from __future__ import annotations

import sys


def keep_pandas_out() -> None:
    """Asked once while there is no pandas, pyarrow does not ask again; what imports pandas by itself still gets it, and
    `to_pandas` works. For a whole process, hence not for one that runs a user's code."""
    if "pandas" in sys.modules:
        return
    import pyarrow as pa

    sys.meta_path.insert(0, _NoPandas)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(_NoPandas)


class _NoPandas:
    """A finder of modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ImportError("not now")
