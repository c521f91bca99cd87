"""After a power cut of the lake's host the next start goes on by itself: nothing is lost, nothing is there twice."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.power_cut import FILE_SYSTEMS, FileSystem, lake_disk
from fixtures.waiting import until

pytestmark = pytest.mark.usefixtures("power_cuts")


# The harness itself: it must lose what was not synced, and nothing else.


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_cut_loses_what_was_not_synced_and_keeps_what_was(file_system: FileSystem) -> None:
    with lake_disk(file_system) as disk:
        (disk.path / "before").write_text("of the day before")
        disk.sync()
        (disk.path / "named").write_text("without a sync")
        _write_synced(disk.path / "synced", b"with a sync of file and folder")
        (disk.path / "nothing").write_text("without a sync, and nobody has synced since")
        disk.cut()
        assert (disk.path / "before").read_text() == "of the day before"
        assert (disk.path / "synced").read_bytes() == b"with a sync of file and folder"
        # The sync of the other file has brought its name to the disk, and not its data.
        assert (disk.path / "named").read_bytes() == b""
        assert not (disk.path / "nothing").exists()


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_cut_takes_whole_process_groups_and_nothing_reaches_the_disk_afterwards(file_system: FileSystem) -> None:
    program = (
        "import os, sys\n"
        "number, child = 0, os.fork()\n"
        "while True:\n"
        "    number += 1\n"
        "    with open(f'{sys.argv[1]}/{child == 0}', 'w') as file:\n"
        "        file.write(str(number)); file.flush(); os.fsync(file.fileno())\n"
    )
    with lake_disk(file_system) as disk:
        job = subprocess.Popen([sys.executable, "-c", program, str(disk.path)], start_new_session=True)
        until(lambda: all((disk.path / name).exists() for name in ("True", "False")), "parent and child write")
        disk.cut(job)
        assert job.returncode is not None
        assert not _members(job.pid)
        found = [(disk.path / name).read_text() for name in ("True", "False")]
        disk.cut()
        assert [(disk.path / name).read_text() for name in ("True", "False")] == found


def test_a_disk_leaves_nothing_behind_when_its_test_fails() -> None:
    before = _devices()
    folders = []

    def fail() -> None:
        with lake_disk("ext4") as disk:
            folders.append(disk.path.parent)
            disk.disturb(1, 0.001)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not folders[0].exists()
    assert _devices() == before
    assert str(folders[0]) not in Path("/proc/self/mounts").read_text()


def _write_synced(path: Path, data: bytes) -> None:
    for place, flags in ((path, os.O_WRONLY | os.O_CREAT), (path.parent, os.O_RDONLY)):
        descriptor = os.open(place, flags)
        try:
            if place == path:
                os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _members(session: int) -> list[int]:
    """The processes of a session that live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getsid(int(entry.name)) == session and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def _devices() -> list[str]:
    """Images below the folders of disks that loop devices hold."""
    return sorted(
        path.read_text()
        for path in Path("/sys/block").glob("loop*/loop/backing_file")
        if "headwater-disk-" in path.read_text()
    )
