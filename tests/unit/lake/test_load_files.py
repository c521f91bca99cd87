"""What loads say of how far they are, as far as it can be read."""

from __future__ import annotations

from pathlib import Path

from headwater.lake.load_files import read_load_files, remove_load_file, shown_loads, write_load_file
from headwater.lake.paths import loads_path


def test_what_a_power_cut_has_left_of_a_load_s_file_is_shown_to_nobody_and_can_be_removed(tmp_path: Path) -> None:
    root = str(tmp_path)
    write_load_file(root, "one", {"session": "headwater load one", "what": "load"})
    for name, content in (("two", b""), ("three", b'{"session": "hea'), ("four", bytes(40))):
        Path(loads_path(root, name)).write_bytes(content)
    assert shown_loads(root, {"headwater load one"}) == [{"what": "load"}]
    for name in read_load_files(root):
        remove_load_file(root, name)
    assert read_load_files(root) == {}
