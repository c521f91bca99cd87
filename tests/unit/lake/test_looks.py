"""How often a lake is looked at: as often as it likes on a disk, ever less in a store where nothing happens."""

from __future__ import annotations

from headwater.lake.looks import Growing, often


def test_looks_at_which_nothing_is_new_come_ever_later_and_the_next_news_brings_them_back() -> None:
    now = 0.0
    looks, at = Growing(1, 10, lambda: now), []
    for second in range(60):
        now = float(second)
        if looks.is_due:
            at.append(second)
            looks.looked(new=second == 47)
    assert at == [1, 3, 7, 15, 25, 35, 45, 55] or at == [1, 3, 7, 15, 25, 35, 45, 55, 56]
    now = 100.0
    looks.looked(new=True)
    now = 101.0
    assert looks.is_due


def test_on_a_disk_nothing_waits_longer_than_a_store_makes_it_wait() -> None:
    disk, store = often("/lake"), often("s3://bucket/lake")
    assert (disk.batch, disk.file, disk.registry, disk.wait) < (store.batch, store.file, store.registry, store.wait)
    assert not Growing(1, disk.file, lambda: 0.0).pause
