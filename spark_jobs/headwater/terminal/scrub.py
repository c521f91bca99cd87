"""Takes passwords out of text that is about to be printed or logged.

A second line of defence: no message is written with a secret in it, but libraries put what they were given into
their errors. Only the secrets it has learned and the usual forms of connection strings are found.
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any
from urllib.parse import quote, quote_plus

_HIDDEN = "***"
# But for the templates of our own remedies.
_URI_PASSWORD = re.compile(r"(://[^\s:/@]*:)(?!password@host:port)[^\s@]+(?=@)")
_KEY_PASSWORD = re.compile(
    r"((?:(?:ssl)?password|oauth_client_secret|scram_(?:client|server)_key)\s*=\s*)(?!\.\.\.(?:\s|$))"
    r"('(?:[^'\\]|\\.)*'|[^\s&'\",)]+)",
    re.IGNORECASE,
)
# What object stores quote of a request in the body of a refusal, which other libraries put into their errors.
_OF_A_REQUEST = re.compile(r"(<(AWSAccessKeyId|Token-\d+|StringToSign|CanonicalRequest)>)[^<]*")


class Scrubber:
    """Replaces the passwords it knows, in every spelling they may have, by three stars."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._add(os.environ.get("PGPASSWORD", ""))

    def learn(self, conninfo: str) -> None:
        """Takes note of `conninfo` and of the passwords in it."""
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        from headwater.pipeline_file.values import LIBPQ_SECRETS

        try:
            options = conninfo_to_dict(conninfo)
        except (ProgrammingError, ValueError):
            options = {}
        secrets = [str(options[key]) for key in LIBPQ_SECRETS if options.get(key)]
        for secret in secrets:
            self._add(secret)
        # A connection string as a whole is a secret only if it holds one.
        if secrets:
            self._known.add(conninfo)

    def _add(self, secret: str) -> None:
        if secret:
            escaped = secret.replace("\\", "\\\\").replace("'", "\\'")
            self._known |= {secret, quote(secret, safe=""), quote_plus(secret), escaped, repr(secret)[1:-1]}

    def scrub(self, text: str) -> str:
        # The longest first: one spelling may contain another.
        for secret in sorted(self._known, key=len, reverse=True):
            text = text.replace(secret, _HIDDEN)
        for pattern in (_URI_PASSWORD, _KEY_PASSWORD, _OF_A_REQUEST):
            text = pattern.sub(rf"\1{_HIDDEN}", text)
        return text

    def scrub_all(self, value: Any) -> Any:
        """`value` with every text in it scrubbed; keys stay."""
        if isinstance(value, str):
            return self.scrub(value)
        if isinstance(value, dict):
            return {key: self.scrub_all(item) for key, item in value.items()}
        return [self.scrub_all(item) for item in value] if isinstance(value, list) else value


class ScrubbingFormatter(logging.Formatter):
    """Log lines, exceptions included, without passwords."""

    def __init__(self, scrubber: Scrubber) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._scrubber = scrubber

    def format(self, record: logging.LogRecord) -> str:
        return self._scrubber.scrub(super().format(record))
