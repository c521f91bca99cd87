"""A table without a usable key leaves the publication: as long as we publish it, the source's own UPDATE and DELETE
fail."""

from __future__ import annotations

import logging
import time
from typing import Final

from headwater.errors import HeadwaterError, Refused
from headwater.names import quote_ident
from headwater.replicate.catalog_watch.facts import CatalogFacts
from headwater.replicate.catalog_watch.judge import Keyless
from headwater.source.catalog.standing import Standing
from headwater.source.connection import Connection
from headwater.source.publication.publication import remove_table

log = logging.getLogger(__name__)

ALARM_SECONDS: Final = 60.0
"""Between two complaints of the same."""


class Unpublishing:
    """Of the tables of `pipeline`. One thread at a time."""

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._alarms: dict[str, float] = {}
        self._failing: set[str] = set()
        self._missed = False

    @property
    def retry_due(self) -> bool:
        """Whether to look again though nothing changed: a lock was not to be had, or an alarm is due."""
        return self._missed or any(time.monotonic() - at > ALARM_SECONDS for at in self._alarms.values())

    def begin(self) -> None:
        """A look at all tables begins."""
        self._failing, self._missed = set(), False

    def end(self) -> None:
        self._alarms = {name: at for name, at in self._alarms.items() if name in self._failing}

    def take_out(
        self, connection: Connection, name: str, keyless: Keyless, standing: Standing, facts: CatalogFacts
    ) -> Keyless:
        """What is to be said of the table, which is published no more, or needs a DBA: an alarm says so."""
        done, statement = self._unpublish(connection, standing, facts)
        if done:
            return keyless.unpublished()
        keyless = keyless.still_published(statement)
        self._failing.add(name)
        if time.monotonic() - self._alarms.get(name, -ALARM_SECONDS) >= ALARM_SECONDS:
            self._alarms[name] = time.monotonic()
            log.error(
                "%s: the source's UPDATE and DELETE fail: %s. What to do: %s", name, keyless.message, keyless.cure
            )
        return keyless

    def _unpublish(self, connection: Connection, standing: Standing, facts: CatalogFacts) -> tuple[bool, str]:
        """Take the table out of the publication: whether that is done, and the statement for a DBA if not."""
        name, publication = standing.now, facts.publications[standing.registered.publication]
        assert name is not None
        assert publication is not None
        statement = f"ALTER PUBLICATION {quote_ident(publication.name)} DROP TABLE ONLY {name}"
        if publication.made_for != self._pipeline or not publication.owned:
            return False, statement
        try:
            # One attempt: this thread also keeps the position file, and comes back in a second.
            remove_table(connection, publication.name, name, wait_seconds=0)
        except Refused:
            return False, statement
        except HeadwaterError as reason:
            if connection.closed:
                raise
            self._missed = True
            log.warning("%s is not out of the publication yet, trying again: %s", name, reason.message)
            return False, statement
        log.warning("%s was taken out of the publication %s: it has no usable key", name, publication.name)
        return True, statement
