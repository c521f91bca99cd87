"""What an object store has answered, for a person: who was asked what, the status, the store's own code and sentence.

Nothing else of an answer's body is shown: stores put the keys, the tokens and the headers of a request into what they
refuse. Nor is the key of an object: folders of partitions are named by values of rows. The text is that of the Rust
crate `object_store`, by which both obstore and delta-rs ask.
"""

from __future__ import annotations

import re
from html import unescape
from typing import Final

_REQUEST: Final = re.compile(
    r"Error performing (?P<method>[A-Z]+) (?P<address>\w+://[^/\s]+)?\S* in \S+?"
    r"(?:, after (?P<retries>\d+) retries.*?)?\s+- (?P<outcome>.*)",
    re.DOTALL,
)
_STATUS: Final = re.compile(
    r"Server returned (?:non-2xx status code: (?P<status>\d{3} ?[^:]*)|error response):", re.DOTALL
)
_CODE: Final = re.compile(r'<Code>([^<]*)|"(?:status|error|reason)"\s*:\s*"([^"]*)')
_SENTENCE: Final = re.compile(r'<Message>([^<]*)|"(?:message|error_description)"\s*:\s*"((?:[^"\\]|\\.)*)')
_BODY_BEGINS: Final = re.compile(r"[<{]")
_LONGEST: Final = 300


def said(text: str) -> str:
    """Of an error's text, in one line."""
    request = _REQUEST.search(text)
    if request is None:
        return _first_line(_BODY_BEGINS.split(text)[0])
    who = f"{request['method']} at {request['address']}" if request["address"] else request["method"]
    tries = f", {int(request['retries']) + 1} times" if request["retries"] else ""
    return f"{who}{tries}: {_outcome(request['outcome'])}"


def status_of(text: str) -> int | None:
    """The status of the answer that the error's text tells of; None: there was no answer."""
    found = _STATUS.search(text)
    return int(found["status"][:3]) if found is not None and found["status"] else None


def _outcome(text: str) -> str:
    answer = _STATUS.match(text)
    if answer is None:
        return _first_line(_BODY_BEGINS.split(text)[0])
    body = text[answer.end() :]
    found = [match[1] or match[2] or "" for pattern in (_CODE, _SENTENCE) if (match := pattern.search(body))]
    words = ": ".join(filter(None, (_first_line(unescape(one)) for one in found)))
    return ", ".join(filter(None, (answer["status"] or "an error", words)))


def _first_line(text: str) -> str:
    """Without the full stop: the sentence that it becomes a part of has one."""
    return next((line.strip()[:_LONGEST].rstrip(".") for line in text.splitlines() if line.strip()), "")
