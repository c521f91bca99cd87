"""What is made of the answers of a person."""

from __future__ import annotations

import getpass

import pytest

from headwater.terminal.questions import Questions


def test_a_password_keeps_its_blanks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getpass", lambda prompt: " two words \r")
    assert Questions().secret("Password") == " two words "
