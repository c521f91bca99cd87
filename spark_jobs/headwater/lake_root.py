"""What a place in a lake may be: a path or a `file:` URI, or a place in an object store.

In a store: `s3://bucket/prefix`, `gs://bucket/prefix`, `abfss://container@account.dfs.core.windows.net/prefix`. Names
are joined to places by `/`, and are what they are: nothing in them is percent-encoded, but in a `file:` URI.
"""

from __future__ import annotations

import os
import re
from typing import Final
from urllib.parse import unquote, urlsplit

STORES: Final = ("s3", "abfss", "gs")
"""Schemes of the object stores."""
_OTHER_SPELLINGS = {"s3a": "s3", "s3n": "s3", "abfs": "abfss", "wasb": "abfss", "wasbs": "abfss", "gcs": "gs"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z")
# In another cloud of Azure's delta-rs finds nothing, and obstore asks the account of the same name in the public one.
_CONTAINER = re.compile(r"[a-z0-9$][a-z0-9-]{1,62}@[a-z0-9]{3,24}\.dfs\.core\.windows\.net\Z")


def is_remote(place: str) -> bool:
    """Whether a place, as `place_of` gives it, lies in an object store."""
    return not place.startswith("/")


def place_of(place: str) -> str:
    """The one way to write `place`: a path of this machine, or a URI in a store without a slash at its end. ValueError
    when it is neither."""
    if place.startswith("/"):
        return os.path.normpath(place)
    scheme = _SCHEME.match(place)
    if scheme is None:
        raise ValueError(f"expected an absolute path, file:/// and an absolute path, or {_stores()}")
    if scheme[1] == "file":
        return _of_file_uri(place)
    if scheme[1] in _OTHER_SPELLINGS:
        raise ValueError(f"{scheme[1]}:// is a name that only Hadoop knows; write {_OTHER_SPELLINGS[scheme[1]]}://")
    if scheme[1] not in STORES:
        raise ValueError(f"{scheme[1]}:// is not known; use file:/// and an absolute path, or {_stores()}")
    return _of_store(place, scheme[1])


def _of_file_uri(place: str) -> str:
    url = urlsplit(place)
    if url.netloc or url.query or url.fragment or not url.path.startswith("/"):
        raise ValueError("expected file:/// and an absolute path (percent-encode ? and #)")
    return os.path.normpath("/" + unquote(url.path).lstrip("/"))


def _of_store(place: str, scheme: str) -> str:
    bucket, *names = place.removeprefix(f"{scheme}://").rstrip("/").split("/")
    known = _CONTAINER if scheme == "abfss" else _BUCKET
    if not place.startswith(f"{scheme}://") or known.match(bucket) is None:
        form, others = f"{scheme}://<bucket>", ""
        if scheme == "abfss":
            form, others = "abfss://<container>@<account>.dfs.core.windows.net", ", no other cloud than the public one"
        raise ValueError(f"expected {form}, and a prefix behind it: no password, no port, no query{others}")
    if any(name in ("", ".", "..") for name in names):
        raise ValueError("expected names between single slashes in the prefix, none of them . or ..")
    return "/".join((f"{scheme}://{bucket}", *names))


def _stores() -> str:
    return ", ".join(f"{scheme}://" for scheme in STORES)


def refuse_misread(place: str) -> None:
    """ValueError for a place that delta-rs takes for another one: `%20` in the name of a folder is a space to it, and
    the URI of a store ends at `?` or `#`, as it drops control characters."""
    try:
        path = place_of(place)
    except ValueError:
        return
    if is_remote(path) and re.search(r"[?#\x00-\x1f\x7f]", path):
        raise ValueError("expected a prefix without ?, # and control characters: delta-rs looks elsewhere for it")
    if found := re.search("%[0-9A-Fa-f]{2}", path):
        raise ValueError(f"delta-rs finds no folder with {found[0]} in its name; give the folder another one")
