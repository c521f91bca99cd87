"""What a place in a lake may be: a path or a `file:` URI. Other stores are refused until commits there exclude each
other."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit


def local_path(place: str) -> str:
    """The path that `place` names; ValueError when it names none on this machine."""
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", place):
        if not place.startswith("/"):
            raise ValueError("expected an absolute path, or file:/// and an absolute path")
        return os.path.normpath(place)
    url = urlsplit(place)
    if url.scheme != "file":
        raise ValueError(f"{url.scheme}:// is not possible yet; use file:/// and an absolute path")
    if url.netloc or url.query or url.fragment or not url.path.startswith("/"):
        raise ValueError("expected file:/// and an absolute path (percent-encode ? and #)")
    return os.path.normpath("/" + unquote(url.path).lstrip("/"))


def refuse_escapes(place: str) -> None:
    """ValueError for a place on this machine that delta-rs does not find: `%20` in the name of a folder is a space to
    it."""
    try:
        path = local_path(place)
    except ValueError:
        return
    if found := re.search("%[0-9A-Fa-f]{2}", path):
        raise ValueError(f"delta-rs finds no folder with {found[0]} in its name; give the folder another one")
