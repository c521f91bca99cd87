"""What the position file says of the source's clock and log: enough to tell how far behind a pipeline is."""

from __future__ import annotations

from datetime import timedelta

from fixtures.lakes import utc
from headwater.replicate.recent_samples import RecentSamples


def test_a_second_s_bytes_are_the_source_s_rate_however_old_the_samples_of_the_driver_before_are() -> None:
    samples = RecentSamples([("2023-11-14T20:00:00.000Z", 0)])
    assert samples.source_rate() is None
    for second in range(40):
        samples.add(utc(second), 10_000 + 100 * second, reached=0)
    assert samples.source_rate() == 100.0


def test_the_sample_that_alone_lies_below_the_position_is_kept_until_another_does() -> None:
    samples = RecentSamples([("2023-11-14T20:00:00.000Z", 5)])
    for second in range(1000):
        samples.add(utc(second), 10_000 + second, reached=5)
    kept = samples.as_tuple()
    assert (len(kept), kept[0]) == (300, ("2023-11-14T20:00:00.000Z", 5))
    for second in range(1000, 1600):
        samples.add(utc(second), 10_000 + second, reached=10_000 + second - 10)
    kept = samples.as_tuple()
    assert [lsn for _, lsn in kept] == list(range(11_300, 11_600))


def test_what_a_clock_said_before_it_was_set_back_is_forgotten() -> None:
    samples = RecentSamples()
    samples.add(utc(100), 1, reached=0)
    samples.add(utc(100) - timedelta(hours=1), 2, reached=0)
    assert [lsn for _, lsn in samples.as_tuple()] == [2]
