"""The door to the lake's files: what each call promises, and that nobody goes around it."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater
from headwater.delta import disk, storage
from headwater.delta.small_tables import append_once, create_table

ENGINE = Path(str(headwater.__file__)).parent

OF_A_PLACE: dict[str, Callable[[str], Any]] = {
    "read": storage.read,
    "read_range": lambda place: storage.read_range(place, 0, 1),
    "read_text": storage.read_text,
    "parquet_file": storage.parquet_file,
    "is_readable": storage.is_readable,
    "exists": storage.exists,
    "info": storage.info,
    "token": storage.token,
    "names": storage.names,
    "files_below": lambda place: list(storage.files_below(place, bool)),
    "write": lambda place: storage.write(place, b""),
    "replace": lambda place: storage.replace(place, b""),
    "put_if_absent": lambda place: storage.put_if_absent(place, b""),
    "append": lambda place: storage.append(place, b""),
    "lines": storage.lines,
    "delta_rs_options": storage.delta_rs_options,
    "why_not_exclusive": storage.why_not_exclusive,
    "link": lambda place: storage.link("/nowhere", place),
    "make_folder": storage.make_folder,
    "make_shared_folder": storage.make_shared_folder,
    "parquet_writer": lambda place: storage.parquet_writer(place, pa.schema([("a", pa.int64())])),
    "delete": storage.delete,
    "delete_files": lambda place: storage.delete_files(place, ["a"]),
    "delete_folder": storage.delete_folder,
    "delete_scratch": lambda place: storage.delete_scratch(place, 0.0),
    "is_folder": storage.is_folder,
    "free": storage.free,
    "why_not_writable": storage.why_not_writable,
    "why_not_permitted": lambda place: storage.why_not_permitted(place, OSError()),
    "uri_of": storage.uri_of,
    "side_by_side": lambda place: storage.side_by_side(place, []),
    "uploads_beside": lambda place: storage.uploads_beside(place).__enter__(),
    "move_folder": lambda place: storage.move_folder("/nowhere", place),
    "exclusive": lambda place: storage.exclusive(place).__enter__(),
    "shared": lambda place: storage.shared(place).__enter__(),
    "exclusive_at_once": lambda place: storage.exclusive_at_once(place).__enter__(),
    "watch_disk": storage.watch_disk,
    "forget": storage.forget,
    "sync": storage.sync,
    "sync_files": storage.sync_files,
    "wants_names": storage.wants_names,
    "wrote": storage.wrote,
}


def test_every_call_with_a_place_is_listed_here() -> None:
    module = ast.parse(Path(str(storage.__file__)).read_text())
    public = {node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    assert public == {*OF_A_PLACE, "path_of", "hadoop_place"}  # those two refuse nothing: others ask them


@pytest.mark.parametrize("name", OF_A_PLACE)
@pytest.mark.parametrize("place", ["s3a://bucket/lake/x", "hdfs://host/lake/x", "abfs://c@host/x"])
def test_other_stores_are_refused_by_every_call(name: str, place: str) -> None:
    with pytest.raises(ValueError, match=f"^{place.partition(':')[0]}:// is "):
        OF_A_PLACE[name](place)


def test_a_token_tells_a_file_from_any_other_of_its_name(tmp_path: Path) -> None:
    place = str(tmp_path / "a")
    assert storage.token(place) is None
    mine = storage.put_if_absent(place, b"abc")
    assert storage.token(place) == mine
    (tmp_path / "b").write_bytes(b"abc")
    (tmp_path / "b").rename(place)
    assert storage.token(place) not in (mine, None)


def test_a_path_and_its_uri_are_the_same_place(tmp_path: Path) -> None:
    path = str(tmp_path / "a b%20ü?#~")
    uri = storage.uri_of(path)
    assert (uri, storage.path_of(uri)) == (Path(path).as_uri(), path)
    storage.write(uri, b"abc")
    assert storage.read(path) == Path(path).read_bytes() == b"abc"
    assert storage.read_text(uri) == "abc"
    assert [storage.read_range(uri, 1, length) for length in (1, 9)] == [b"b", b"bc"]
    table = pa.table({"a": [1, 2]})
    with storage.parquet_writer(f"{uri}.parquet", table.schema) as writer:
        writer.write_table(table)
    with storage.parquet_file(f"{path}.parquet") as file:
        assert file.read() == table


def test_what_is_missing(tmp_path: Path) -> None:
    missing = str(tmp_path / "a" / "b")
    for name in ("read", "read_range", "read_text", "parquet_file", "info", "write", "put_if_absent", "parquet_writer"):
        with pytest.raises(FileNotFoundError):
            OF_A_PLACE[name](missing)
    assert not storage.exists(missing)
    assert not storage.is_folder(missing)
    assert storage.names(missing) == [] == list(storage.files_below(missing, bool))
    storage.delete(missing)
    storage.delete_folder(missing)
    assert list(tmp_path.iterdir()) == []


CONTENDER = """
import sys
from headwater.delta import storage
from headwater.delta.small_tables import append_once, create_table
folder, worker = sys.argv[1:]
for version in range(200):
    try:
        storage.put_if_absent(f"{folder}/{version}", f"{worker} ".encode() * 5000)
        print(version)
    except FileExistsError:
        pass
"""


def test_of_writers_of_one_name_exactly_one_succeeds(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CONTENDER, str(tmp_path), str(worker)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for worker in range(3)
    ]
    won = [worker.communicate(timeout=120)[0].split() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert sorted(name for names in won for name in names) == sorted(map(str, range(200)))
    for worker, names in enumerate(won):
        assert all((tmp_path / name).read_text() == f"{worker} " * 5000 for name in names)
    assert len(list(tmp_path.iterdir())) == 200, "no scratch file is left"


def test_a_replaced_file_is_read_whole_at_any_moment(tmp_path: Path) -> None:
    """By two writers: two containers may well have the same process number."""
    place = str(tmp_path / "position.json")
    storage.replace(place, b"0" * 50_000)

    def write() -> None:
        for number in range(300):
            storage.replace(place, str(number % 10).encode() * 50_000)

    seen = set()
    with ThreadPoolExecutor(2) as threads:
        writers = [threads.submit(write) for _ in range(2)]
        while not all(writer.done() for writer in writers):
            content = storage.read(place)
            assert len(content) == 50_000
            assert content == content[:1] * 50_000
            seen.add(content[:1])
        for writer in writers:
            writer.result()
    assert seen
    assert storage.names(str(tmp_path)) == ["position.json"]


def test_a_linked_file_outlives_its_first_name_and_takes_none_of_another_file(tmp_path: Path) -> None:
    first, second, other = (str(tmp_path / name) for name in ("staged", "named", "other"))
    storage.write(first, b"rows")
    storage.write(other, b"rows")
    storage.link(first, second)
    storage.link(first, second)  # what comes again after a failed commit
    with pytest.raises(FileExistsError):
        storage.link(other, second)
    storage.delete(first)
    assert storage.read(second) == b"rows"


def test_a_listing_has_sizes_and_times_and_goes_where_it_is_let(tmp_path: Path) -> None:
    lake, elsewhere = tmp_path / "lake", tmp_path / "elsewhere"
    for folder in (lake / "p=a%20b" / "q=ü", lake / "_hidden", elsewhere):
        folder.mkdir(parents=True)
        (folder / "x.parquet").write_bytes(b"12345")
    (lake / "top").write_bytes(b"")
    os.utime(lake / "top", (1.5e9, 1.5e9 + 0.25))
    (lake / "link").symlink_to(elsewhere)
    found = {info.path: info for info in storage.files_below(str(lake), lambda name: not name.startswith("_"))}
    assert set(found) == {"top", "p=a%20b/q=ü/x.parquet"}, "what a link leads to may be somebody else's"
    assert found["top"].size == 0
    assert abs(found["top"].modified - 1.5e9 - 0.25) < 1e-6
    assert found["p=a%20b/q=ü/x.parquet"].size == 5
    assert abs(found["p=a%20b/q=ü/x.parquet"].modified - time.time()) < 60
    assert storage.info(str(lake / "top")) == replace(found["top"], path=str(lake / "top"))
    assert sorted(storage.names(str(lake))) == ["_hidden", "link", "p=a%20b", "top"]


def test_files_and_folders_have_the_rights_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        storage.make_folder(str(tmp_path / "a" / "private"), mode=0o700)
        storage.make_folder(str(tmp_path / "a" / "private"), mode=0o700)
        storage.write(str(tmp_path / "a" / "file"), b"")
    finally:
        os.umask(before)
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/private", "a/file")}
    assert modes == {"a": 0o750, "a/private": 0o700, "a/file": 0o640}


def test_a_folder_goes_with_all_that_is_in_it_and_with_nothing_that_is_linked(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "gone" / "deep").mkdir(parents=True)
    (tmp_path / "gone" / "deep" / "file").touch()
    (tmp_path / "gone" / "link").symlink_to(kept)
    storage.delete_folder(str(tmp_path / "gone"))
    assert storage.names(str(tmp_path)) == ["kept"]
    assert storage.names(str(kept)) == ["file"]


# Nobody goes around it

BESIDE = {
    "delta/storage.py": "the door itself",
    "delta/disk.py": "behind the door",
    "delta/object_store.py": "behind the door",
    "apply/by_spark/frames.py": "spilled rows that Spark on this machine reads",
    "delta/index/cache.py": "the cache of indexes on local disk",
    "delta/index/runs.py": "runs of keys, mapped from local disk",
    "delta/index/written_keys.py": "keys of a commit that wait on local disk",
    "setup/init.py": "the pipeline file that it writes",
    "replicate/reader/pipe.py": "memory without a name, from one process to the other",
    "lake/executors.py": "the engine's own modules, packed for executors",
    "validate/suites.py": "suites of expectations, which lie beside the pipeline file",
    "reading/dbt_duckdb.py": "the file of a cut, which its caller has written",
    "demo": "a server and a scheduler of its own, in a folder of its own",
}
"""What may open files by itself, and which ones."""
ELSEWHERE = ("cli", "log", "pipeline_file", "source", "spark", "terminal", *(path.name for path in ENGINE.glob("*.py")))
"""What has no business with the lake's files."""

_OPENS = re.compile(
    r"""(?x)
    open$ | io\.(open|FileIO)
    | (pathlib|shutil|tempfile|glob|mmap|codecs|fileinput|linecache|sqlite3)\b
    # What is left works on the process, on names, and on descriptors, which only the others could have made of a file.
    | os\.(?!(PathLike|environ|getpid|nice|_exit|path|write|readv)\b)
    | os\.path\.(?!(join|basename|dirname|split|relpath)$)
    | pyarrow\.(fs|parquet|dataset|csv|feather|orc|json|OSFile|memory_map|input_stream|output_stream)\b
    | obstore\b | headwater\.delta\.(disk|object_store)\b
    | numpy\.(load|save|memmap|fromfile|genfromtxt|lib)
    """
)


def goes_around(source: str) -> set[str]:
    """What in a module opens files, or may."""
    nodes = list(ast.walk(ast.parse(source)))
    used, meant = set(), {"open": "open"}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            below = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                used.add(below + alias.name)
                first = alias.name.partition(".")[0]
                meant[alias.asname or first] = below + (alias.name if alias.asname else first)
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and re.fullmatch(r"[\w.]+", text := ast.unparse(node)):
            first, dot, rest = text.partition(".")
            used.add(meant.get(first, "?") + dot + rest)
    return {name for name in used if _OPENS.match(name)}


def test_the_rooms_open_files_through_the_door_alone() -> None:
    modules = [path for path in sorted(ENGINE.rglob("*.py")) if path.relative_to(ENGINE).parts[0] not in ELSEWHERE]
    names = {path: path.relative_to(ENGINE).as_posix() for path in modules}
    found = {names[path]: ways for path in modules if (ways := goes_around(path.read_text()))}
    excepted = {name: one for name in found for one in BESIDE if f"{name}/".startswith(f"{one}/")}
    assert not {name: sorted(ways) for name, ways in found.items() if name not in excepted}, (
        "these open files by themselves: let headwater.delta.storage do it, unless they are no part of the lake"
    )
    assert set(excepted.values()) == set(BESIDE), "one of these has no need of its exception any more"


@pytest.mark.parametrize(
    "source",
    [
        "open('x')",
        "import io\nio.open('x')",
        "from pathlib import Path",
        "import os as system\nsystem.unlink('x')",
        "from os import link as tie",
        "import os.path\nos.path.exists('x')",
        "from os.path import getsize",
        "def f():\n    import shutil",
        "import pyarrow as pa\npa.memory_map('x')",
        "import pyarrow.parquet as pq",
        "from pyarrow import fs",
        "import numpy as np\nnp.load('x')",
        "opener = open",
    ],
)
def test_ways_around_are_seen(source: str) -> None:
    assert goes_around(source)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ.get('HOME'), os.getpid()",
        "import os.path\nos.path.join('a', 'b')",
        "from os.path import join, basename",
        "class A:\n    def open(self): ...\nA().open()\nregistry.open('x')",
        "import pyarrow as pa\nimport pyarrow.compute as pc\npa.table({})",
        "from headwater.lake import storage\nstorage.read('x')",
    ],
)
def test_what_opens_nothing_may_be_used(source: str) -> None:
    assert not goes_around(source)


def _synced(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Paths whose descriptors fsync was called with, as they come."""
    found: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_where_a_file_system_is_not_synced_as_a_whole_each_file_is_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_is_synced_as_a_whole", lambda folder: False)
    root = str(tmp_path / "lake")
    storage.make_folder(f"{root}/t")
    storage.write(f"{root}/t/written", b"1")
    storage.replace(f"{root}/t/replaced", b"1")
    storage.put_if_absent(f"{root}/t/put", b"1")
    storage.link(f"{root}/t/put", f"{root}/t/linked")
    with storage.parquet_writer(f"{root}/t/file.parquet", pa.schema([("a", pa.int64())])) as writer:
        storage.sync(root)  # one that is still being written is synced once more when it is whole
        writer.write_table(pa.table({"a": [1]}))
    storage.write(str(tmp_path / "elsewhere"), b"1")
    ledger = create_table(f"{root}/ledger", pa.schema([("a", pa.int64())]))
    append_once(ledger, [{"a": 1}], pa.schema([("a", pa.int64())]))
    storage.write(f"{root}/t/more", b"1")
    synced = _synced(monkeypatch)
    storage.sync(root)
    by_others = {str(path) for path in Path(root, "ledger").rglob("*") if path.suffix in (".parquet", ".json")}
    assert synced >= {f"{root}/t/file.parquet", f"{root}/t/more", f"{root}/t", f"{root}/ledger/_delta_log"}
    assert synced >= by_others
    assert f"{root}/t/written" not in synced
    assert str(tmp_path / "elsewhere") not in synced
    synced.clear()
    storage.sync(root)
    assert not synced


def test_a_sync_that_failed_fails_until_a_job_begins_anew_and_is_then_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_is_synced_as_a_whole", lambda folder: False)
    storage.watch_disk(str(tmp_path))
    storage.write(str(tmp_path / "a"), b"1")
    with monkeypatch.context() as broken:

        def fsync(descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        broken.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output error"):
            storage.sync_files(str(tmp_path / "a"))
    with pytest.raises(OSError, match="Input/output error"):
        storage.sync(str(tmp_path))
    storage.watch_disk(str(tmp_path))
    synced = _synced(monkeypatch)
    storage.sync(str(tmp_path))
    assert str(tmp_path / "a") in synced


def test_the_file_system_of_a_folder_is_that_of_the_deepest_mount() -> None:
    assert disk._file_system("/proc/self") == "proc"
    assert disk._file_system("/dev/shm") == "tmpfs"
    assert disk._file_system("/nowhere/at/all") == disk._file_system("/")


def test_a_lock_of_another_user_can_be_had() -> None:
    """Jobs of several users may share a lake."""
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        lock = folder / "a.lock"
        lock.touch()
        lock.chmod(0o444)
        if is_root := os.geteuid() == 0:  # whom no mode keeps out
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError):
                lock.open("a")
            with storage.shared(str(lock)), storage.exclusive_at_once(str(lock)) as alone:
                assert not alone
            with storage.exclusive(str(lock)), storage.exclusive_at_once(str(lock)) as alone:
                assert not alone
            with storage.exclusive_at_once(str(lock)) as alone:
                assert alone
        finally:
            if is_root:
                os.seteuid(0)
    finally:
        shutil.rmtree(folder)
