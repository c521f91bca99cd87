"""`make demo LAKE=s3` runs its command beside an S3 server that is there as long as the command is, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.object_stores import absent
from fixtures.waiting import until
from servers import with_s3

PROGRAM = Path(with_s3.__file__)
PUT = """
import os, obstore
from obstore.store import S3Store
store = S3Store("headwater", client_options={"allow_http": True}, config={"virtual_hosted_style_request": "false"})
obstore.put(store, "a/b", b"content")
print(os.environ["AWS_ENDPOINT_URL"], bytes(obstore.get(store, "a/b").bytes()).decode(), flush=True)
"""


@pytest.fixture(autouse=True)
def server() -> None:
    if not with_s3.VERSITYGW.exists():
        absent("versitygw is not there: `make servers` makes it")


def begun(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, PROGRAM, sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def servers(address: str) -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].endswith(b"versitygw") and address.removeprefix("http://").encode() in words:
                found.append(process.name)
    return found


def test_the_command_is_told_where_the_server_is_and_its_status_is_handed_on() -> None:
    program = begun(f"{PUT}\nraise SystemExit(7)")
    out, _ = program.communicate(timeout=60)
    address, content = out.split()
    assert (content, program.returncode) == ("content", 7)
    assert not servers(address)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_ends_however_the_program_does(number: signal.Signals) -> None:
    program = begun(f"{PUT}\nimport time\nparent = os.getppid()\nwhile os.getppid() == parent: time.sleep(0.1)")
    assert program.stdout is not None
    address = program.stdout.readline().split()[0]
    assert servers(address)
    os.kill(program.pid, number)
    program.wait(30)
    until(lambda: not servers(address), "the server has ended")
