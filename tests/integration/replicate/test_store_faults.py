"""A driver whose lake is in S3 on a bad day: requests are refused, answers are lost, the store is away.

Nothing is lost, nothing is there twice, and no table is suspended for it.

HEADWATER_SEED replays the run of a seed; the soak plays 500.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from fixtures.bank import TABLES, Bank, assert_cuts_consistent, replicated_bank, writing
from fixtures.jobs import Job, assert_equal, catch_up, failing, following, states_of, until
from fixtures.object_stores import Proxy, S3Server, Toxiproxy
from fixtures.soak import SOAK
from fixtures.store_faults import MoodyStore, bad_day, wait_while
from headwater import store_options
from headwater.apply import warm_tables
from headwater.delta.tables import current
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Transient
from headwater.monitor.status import status

pytestmark = pytest.mark.postgres

SEEDS = int(os.environ.get("HEADWATER_SOAK_SEEDS", "500")) if SOAK else 2
SECONDS = 3.0
_TESTS_OF_A_BANK = 20
"""It grows with each of them, and all of it is compared with the source."""


@pytest.fixture(scope="module")
def store(s3_server: S3Server) -> Iterator[MoodyStore]:
    with MoodyStore(s3_server.address) as store:
        yield store


@pytest.fixture(scope="module")
def proxy(store: MoodyStore, toxiproxy: Toxiproxy) -> Iterator[Proxy]:
    proxy = toxiproxy.before(store.address)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def next_bank(
    postgres: EmbeddedServer,
    tmp_path_factory: pytest.TempPathFactory,
    s3_server: S3Server,
    proxy: Proxy,
) -> Iterator[Callable[[], Bank]]:
    """The bank of the last test, or another one after some. Its lake is in S3. Requests are repeated for a second, and
    not for a minute: what goes on longer is the driver's own to bear."""
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as lasting:
        patch.setattr(store_options, "JOB_PATIENCE_SECONDS", 1)
        patch.setattr(store_options, "PATIENCE_SECONDS", 1)

        def banks() -> Iterator[Bank]:
            while True:
                lasting.close()
                lake, folder = s3_server.through(proxy.address).lake("lake"), tmp_path_factory.mktemp("bank")
                bank = lasting.enter_context(replicated_bank(postgres, folder, seed=5, lake=lake))
                yield from itertools.repeat(bank, _TESTS_OF_A_BANK)

        yield partial(next, banks())


@pytest.fixture
def bank(next_bank: Callable[[], Bank]) -> Bank:
    return next_bank()


@pytest.mark.parametrize("turn", range(SEEDS if "HEADWATER_SEED" not in os.environ else 1))
def test_whatever_the_store_does_the_lake_becomes_the_source_and_every_cut_is_a_state_it_had(
    turn: int, bank: Bank, proxy: Proxy, store: MoodyStore
) -> None:
    drawn = random.SystemRandom().randrange(1 << 31) if SOAK else 1000 + turn
    seed = int(os.environ.get("HEADWATER_SEED", drawn))
    print(f"\nHEADWATER_SEED={seed}")
    chance = random.Random(seed)
    known = bank.epoch
    with bad_day(proxy, store, seed) as seen, writing(bank.database, seed):
        if chance.random() < 0.3:
            with Job(bank.pipeline, "replicate") as job:
                wait_while(lambda: job.process.poll() is None, chance.uniform(1, SECONDS + 1))
                job.process.send_signal(signal.SIGKILL)
        else:
            with failing(bank.pipeline) as driver:
                wait_while(lambda: not driver.done(), SECONDS)
            error = driver.exception()
            # Which the command line names alike: lake_unavailable.
            assert error is None or isinstance(error, Transient | OSError), error
    print(dict(seen), store.answered)
    assert set(states_of(catch_up(bank.pipeline)).values()) == {"active"}
    assert_equal(bank.database, bank.pipeline, *TABLES)
    assert assert_cuts_consistent(bank.pipeline, known) > known


def test_a_driver_rides_out_that_its_store_is_away(bank: Bank, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_options, "JOB_PATIENCE_SECONDS", 30)
    with following(bank.pipeline) as driver:
        before = bank.epoch
        bank.writer.write(5)
        until(lambda: bank.epoch > before or driver.done(), "it publishes")
        proxy.away()
        bank.writer.write(5)
        wait_while(lambda: not driver.done(), 12)  # longer than a person would wait
        proxy.back()
        before = bank.epoch
        bank.writer.write(5)
        until(lambda: bank.epoch > before or driver.done(), "it goes on", 60)
    assert set(states_of(status(bank.pipeline)).values()) == {"active"}
    catch_up(bank.pipeline)
    bank.assert_exact()


def test_a_start_looks_at_all_its_tables_at_the_same_time(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other none would get past the barrier."""
    together = threading.Barrier(len(TABLES), timeout=60)

    def current_together(*table: Any) -> tuple[int, int] | None:
        together.wait()
        return current(*table)

    monkeypatch.setattr(warm_tables, "current", current_together)
    catch_up(bank.pipeline)
    assert_equal(bank.database, bank.pipeline, *TABLES)
