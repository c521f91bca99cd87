"""What the source had counted is noted in the lake; whoever loses it loses candidates of `reload --changed` alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.lake.paths import source_counts_path
from headwater.verify.counts_file import Counted, read_counts, write_counts


@pytest.mark.parametrize("left", [b"", bytes(9), b'{"public.t": {"inc'])
def test_what_a_power_cut_has_torn_is_as_if_nothing_had_been_noted(tmp_path: Path, left: bytes) -> None:
    noted = {"public.t": Counted(1, 0x1000, {7: 3}, "2026-01-01T00:00:00Z")}
    file = Path(source_counts_path(str(tmp_path)))
    file.parent.mkdir(parents=True)
    write_counts(str(tmp_path), noted)
    assert read_counts(str(tmp_path)) == noted
    file.write_bytes(left)
    assert read_counts(str(tmp_path)) == {}
