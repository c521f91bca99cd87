"""Change blocks on disk: nobody else may read them, nothing is left behind, and a full disk is said clearly."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import pgoutput as pg
from headwater.errors import HeadwaterError, Refused, Transient
from headwater.log.blocks import Chunk
from headwater.log.framing import Framer
from headwater.log.spill import Spilled, SpillFolder, SpillStore, spill_files, sweep

TABLE = 1


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[SpillFolder]:
    with SpillFolder(str(tmp_path)) as made:
        yield made


def large(store: SpillStore, rows: int = 500) -> Chunk:
    """A transaction of which all but the end went to disk."""
    framer = Framer(store, open_bytes=1000)
    framer.take([pg.relation(TABLE, "v"), pg.begin(5, 100)])
    for number in range(rows):
        framer.feed(pg.insert(TABLE, number))
    framer.take([pg.commit(100)])
    return framer.cut()


def files(folder: SpillFolder) -> list[Path]:
    return sorted(Path(folder.path).iterdir())


def test_only_the_user_may_look_into_the_folder_and_its_files(folder: SpillFolder) -> None:
    chunk = large(SpillStore(folder.path, 1 << 30))
    assert stat.S_IMODE(os.stat(folder.path).st_mode) == 0o700
    assert [stat.S_IMODE(file.stat().st_mode) for file in files(folder)] == [0o600]
    assert pg.changes_of(chunk) == [(5, [(TABLE, "v", number) for number in range(500)])]


def test_a_chunk_on_disk_travels_as_references(folder: SpillFolder) -> None:
    chunk = large(SpillStore(folder.path, 1 << 30), 3000)
    assert len(pickle.dumps(chunk)) < chunk.size / 4
    assert pg.changes_of(pickle.loads(pickle.dumps(chunk))) == pg.changes_of(chunk)


def test_the_file_goes_with_the_last_block_that_its_owner_lets_go(folder: SpillFolder) -> None:
    chunk: Any = pickle.loads(pickle.dumps(large(SpillStore(folder.path, 1 << 30))))
    (file,) = spill_files(chunk.blocks)
    file.remove_after_use()
    blocks = [block for block in chunk.blocks if isinstance(block.content, Spilled)]
    chunk = file = None  # type: ignore[assignment]
    gc.collect()
    assert len(files(folder)) == 1
    blocks.clear()
    gc.collect()
    assert not files(folder)


def test_a_folder_whose_owner_was_killed_is_swept_and_one_whose_owner_lives_is_not(tmp_path: Path) -> None:
    program = (
        "import sys, time; from headwater.log.spill import SpillFolder; folder = SpillFolder(sys.argv[1]).__enter__(); "
        "open(folder.path + '/1.blocks', 'w').write('x'); print(folder.path, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    left = owner.stdout.readline().strip()
    with SpillFolder(str(tmp_path)) as living:
        assert os.path.isdir(left)
        owner.kill()
        owner.wait()
        assert sweep(str(tmp_path)) == [left]
        assert os.path.isdir(living.path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def meddled(**how: str) -> str:
        made.append(make(**how))
        if len(made) < 3:
            assert sweep(str(tmp_path)) == [made[-1]]
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", meddled)
    with SpillFolder(str(tmp_path)) as folder:
        assert folder.path == made[2]
        assert sweep(str(tmp_path)) == []


def test_what_only_looks_like_a_spill_folder_is_left_alone(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").touch()
    (tmp_path / "headwater-spill-link").symlink_to(precious)
    (tmp_path / "headwater-spill-file").touch()
    assert sweep(str(tmp_path)) == []
    assert (precious / "data").exists()


def _refusal(store: SpillStore) -> HeadwaterError:
    with pytest.raises(HeadwaterError) as full:
        large(store)
    assert full.value.code == "spill_full"
    assert "nothing is lost" in full.value.remedy
    return full.value


def test_beyond_the_budget_a_person_is_asked(folder: SpillFolder) -> None:
    error = _refusal(SpillStore(folder.path, 20_000))
    assert isinstance(error, Refused)
    assert "replicate.spill" in error.remedy
    assert sum(file.stat().st_size for file in files(folder)) <= 20_000


def test_what_the_driver_has_let_go_counts_no_more(folder: SpillFolder) -> None:
    store = SpillStore(folder.path, 60_000)
    for _ in range(5):
        for file in spill_files(large(store).blocks):
            file.remove()
    assert store.written > 60_000


def test_a_full_disk_is_said_so_and_may_be_tried_again(folder: SpillFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headwater.log.spill.os.open", no_room)
    error = _refusal(SpillStore(folder.path, 1 << 30))
    assert isinstance(error, Transient)
    assert "No space left on device" in error.message
