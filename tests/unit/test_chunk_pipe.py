"""What the reader sends arrives unchanged, whatever its size, and an end of the pipe that is gone is noticed."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from headwater.jobs.chunk_pipe import ChunkReceiver, ChunkSender


@dataclass
class Pipe:
    receiver: Connection
    sender: Connection


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    yield Pipe(receiver, sender)
    receiver.close()
    sender.close()


def test_small_and_large_arrays_arrive_as_they_were(pipe: Pipe) -> None:
    generator = np.random.default_rng(3)
    sizes = [0, 1, 1000, (64 << 10) - 1, 64 << 10, 3 << 20]
    sent: list[dict[str, Any]] = [
        {"n": n, "bytes": generator.integers(0, 256, n, dtype=np.uint8), "numbers": np.arange(n)} for n in sizes
    ]
    sender = ChunkSender(pipe.sender)

    def send_all() -> None:
        for item in sent:
            sender.send(item)

    thread = threading.Thread(target=send_all)
    thread.start()
    receiver = ChunkReceiver(pipe.receiver)
    for item in sent:
        received = receiver.receive()
        assert received["n"] == item["n"]
        assert np.array_equal(received["bytes"], item["bytes"])
        assert np.array_equal(received["numbers"], item["numbers"])
    thread.join()


def test_a_sender_that_is_gone_ends_the_receiver(pipe: Pipe) -> None:
    ChunkSender(pipe.sender).send("last")
    pipe.sender.close()
    receiver = ChunkReceiver(pipe.receiver)
    assert receiver.receive() == "last"
    with pytest.raises(EOFError):
        receiver.receive()


def test_a_receiver_that_is_gone_ends_the_sender(pipe: Pipe) -> None:
    pipe.receiver.close()
    with pytest.raises(BrokenPipeError):
        ChunkSender(pipe.sender).send("nobody listens")
