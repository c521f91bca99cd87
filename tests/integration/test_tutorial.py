"""The tutorial is what its reader types, on a server of one's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.demo.postgres import EmbeddedServer

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.postgres
@pytest.mark.spark
def test_the_tutorial_as_it_is_written_ends_with_what_it_promises(
    tmp_path: Path, server_folder: Callable[[], Path], server_binaries: Path
) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    shell = [text for kind, text in blocks if kind == "sh"]
    [report] = [text for kind, text in blocks if kind == "python"]
    (tmp_path / "report.py").write_text(report)
    with EmbeddedServer(server_folder(), server_binaries, durable=False) as server:
        with server.connect() as connection:
            connection.execute("alter role postgres password 'secret'")
        dba = server.conninfo(user="postgres", password="secret")
        # The first block says where checkout and server are: here they are elsewhere.
        path = os.pathsep.join([str(Path(sys.executable).parent), str(server_binaries), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-ec", "".join(shell[1:])],
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "DBA": dba, "HEADWATER_SPARK_MASTER": "local[1]"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "|Ada Lovelace|  250500.00|" in done.stdout
    assert not (tmp_path / "lake").exists()
