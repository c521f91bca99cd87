"""A connection with sslmode=verify-full, to a server with a certificate: only the right one is spoken to."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.demo.postgres import EmbeddedServer
from headwater.errors import HeadwaterError
from headwater.source.connection import connect

pytestmark = pytest.mark.postgres


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(server_folder: Callable[[], Path]) -> Path:
    """A server's certificate for 127.0.0.1, the authority that signed it, and another authority."""
    folder = server_folder()
    new_key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    for name in ("authority", "stranger"):
        _openssl(
            folder, "req", "-x509", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.crt"
        )
    (folder / "names").write_text("subjectAltName = IP:127.0.0.1\n")
    _openssl(folder, "req", *new_key[:3], "-subj", "/CN=source", "-keyout", "server.key", "-out", "server.csr")
    signed = ("-CA", "authority.crt", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    _openssl(folder, "x509", "-req", "-in", "server.csr", *signed, "-out", "server.crt")
    folder.chmod(0o711)
    (folder / "server.key").chmod(0o600)
    if os.geteuid() == 0:  # the user that the server runs as there
        os.chown(folder / "server.key", pwd.getpwnam("nobody").pw_uid, -1)
    return folder


@pytest.fixture(scope="module")
def server(server_folder: Callable[[], Path], certificates: Path) -> Iterator[EmbeddedServer]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        pytest.skip("the wheels' servers are built without TLS, and Debian's PostgreSQL is not installed")
    files = {
        f"ssl_{kind}_file": str(certificates / f"server.{ending}") for kind, ending in (("cert", "crt"), ("key", "key"))
    }
    with EmbeddedServer(server_folder(), found[-1].parent, {"ssl": True, **files}, durable=False) as running:
        yield running


def _conninfo(server: EmbeddedServer, certificates: Path, authority: str, host: str = "127.0.0.1") -> str:
    address = server.conninfo().replace("@127.0.0.1", f"@{host}")
    return f"{address}?sslmode=verify-full&sslrootcert={certificates / authority}.crt"


def test_the_right_server_is_spoken_to_in_cipher(server: EmbeddedServer, certificates: Path) -> None:
    with connect(_conninfo(server, certificates, "authority")) as connection:
        assert connection.execute("select ssl from pg_stat_ssl where pid = pg_backend_pid()").fetchone() == (True,)


@pytest.mark.parametrize(
    ("authority", "host"),
    [("stranger", "127.0.0.1"), ("authority", "localhost"), ("missing", "127.0.0.1")],
    ids=["another authority", "another name", "no such file"],
)
def test_a_certificate_of_another_authority_or_name_is_refused(
    server: EmbeddedServer, certificates: Path, authority: str, host: str
) -> None:
    with pytest.raises(HeadwaterError, match="certificate") as caught:
        connect(_conninfo(server, certificates, authority, host))
    assert server.conninfo().split(":")[2].split("@")[0] not in str(caught.value)
    assert (caught.value.code, "sslrootcert" in caught.value.remedy) == ("bad_connection", True)
