"""What the reader sends arrives unchanged, whatever its size, and an end of the pipe that is gone is noticed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.replicate.reader.pipe import ChunkReceiver, ChunkSender


@dataclass
class Pipe:
    receiver: Connection
    sender: Connection


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    receiver, sender = multiprocessing.Pipe()
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


def test_a_receiver_that_is_busy_keeps_no_sender_waiting(pipe: Pipe) -> None:
    large = [np.arange(1 << 20) + n for n in range(4)]  # 32 MB: more than any socket takes
    sender = ChunkSender(pipe.sender)
    for item in large:
        sender.send(item)
    receiver = ChunkReceiver(pipe.receiver)
    for item in large:
        assert np.array_equal(receiver.receive(), item)


def test_memory_of_what_was_sent_goes_with_the_last_array_on_it(pipe: Pipe) -> None:
    sender, receiver = ChunkSender(pipe.sender), ChunkReceiver(pipe.receiver)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("headwater-chunk")

    def is_open() -> bool:
        # Others of this process open and close files meanwhile.
        return any(
            "headwater-chunk" in os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
        )

    before = mapped()
    sender.send({"one": np.arange(100_000), "two": np.arange(200_000)})
    found = receiver.receive()
    assert mapped() == before + 1
    assert not is_open()
    one = found.pop("one")
    del found
    assert one[-1] == 99_999
    del one
    gc.collect()
    assert mapped() == before
