"""A password that changes, at a server that speaks another language than English."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from headwater.errors import HeadwaterError
from headwater.pipeline_file.values import CONNECTION_SOCKET
from headwater.source import renewal
from headwater.source.connection import connect

GERMAN = "Passwort-Authentifizierung für Benutzer »reader« fehlgeschlagen"
ENGLISH = 'password authentication failed for user "reader"'


def packet(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


def refusing(listener: socket.socket, passwords: list[str], words: str) -> None:
    """A server that lets nobody in, and the passwords that it was sent."""
    while True:
        try:
            session, _ = listener.accept()
        except OSError:
            return
        with session:
            session.recv(4096)
            session.sendall(packet(b"R", struct.pack(">I", 3)))
            passwords.append(session.recv(4096)[5:-1].decode())
            session.sendall(packet(b"E", f"SFATAL\0VFATAL\0C28P01\0M{words}\0\0".encode()))


@pytest.mark.parametrize(("words", "another"), [(GERMAN, ""), (ENGLISH, ""), (ENGLISH, ",127.0.0.1:1")])
def test_a_refused_password_is_asked_for_again_whatever_the_server_calls_it(
    monkeypatch: pytest.MonkeyPatch, words: str, another: str
) -> None:
    """Also where another host, which is down, was tried last: its error is the one that is told."""
    passwords: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refusing, args=(listener, passwords, words), daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}{another}/shop?sslmode=disable"
        monkeypatch.setattr(renewal, "_newest", {})
        monkeypatch.setattr(renewal, "_ask", lambda path: f"postgresql://reader:second@{address}")
        monkeypatch.setenv(CONNECTION_SOCKET, "answered above")
        with pytest.raises(HeadwaterError, match=words):
            connect(f"postgresql://reader:first@{address}")
        listener.shutdown(socket.SHUT_RDWR)
    assert passwords == ["first", "second"]
