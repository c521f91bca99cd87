"""A driver whose task process is gone ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headwater.spark.parent_watch import PARENT_PID, PARENT_START, parent_environment, process_start, watch_parent

STUBBORN = """
import sys, threading
from headwater.spark.parent_watch import watch_parent
watch_parent(lambda: print("asked to stop", flush=True), poll_seconds=0.05, grace_seconds=0.2)
print("watching", flush=True)
threading.Event().wait()
"""
TERMINATED = STUBBORN.replace('lambda: print("asked to stop", flush=True), ', "")
SESSION = """
import threading
from headwater.session import build_session
from headwater.spark import session
session._session = lambda *arguments: None
session.enter = session.require_jars = lambda *arguments: None
for _ in range(2):
    build_session()
print("watching", flush=True)
threading.Event().wait()
"""
"""A user's job, without Spark."""
WAIT_SECONDS = 30


@pytest.fixture
def task() -> subprocess.Popen[bytes]:
    """A process that stands for the Airflow task."""
    return subprocess.Popen(["sleep", "1000"])


def driver(code: str, task: subprocess.Popen[bytes]) -> subprocess.Popen[str]:
    environment = {**os.environ, PARENT_PID: str(task.pid), PARENT_START: process_start(task.pid) or ""}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[3] / "spark_jobs")
    started = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "watching\n"
    return started


def test_a_driver_is_asked_to_stop_and_then_ended_when_its_task_was_killed(task: subprocess.Popen[bytes]) -> None:
    watched = driver(STUBBORN, task)
    assert watched.poll() is None
    task.kill()  # it stays a zombie until we wait for it: that counts as gone
    out, err = watched.communicate(timeout=WAIT_SECONDS)
    task.wait()
    assert out == "asked to stop\n"
    assert watched.returncode == 1
    assert f"the task process {task.pid} that started this driver is gone" in err


def test_a_program_with_a_session_of_headwaters_ends_with_its_task(task: subprocess.Popen[bytes]) -> None:
    watched = driver(SESSION, task)
    task.kill()
    _, err = watched.communicate(timeout=WAIT_SECONDS)
    task.wait()
    assert watched.returncode == -signal.SIGTERM
    assert err.count("is gone: stopping") == 1


def test_a_task_is_watched_once(task: subprocess.Popen[bytes]) -> None:
    environment = {PARENT_PID: str(task.pid), PARENT_START: process_start(task.pid) or ""}
    gone, never = threading.Event(), threading.Event()
    watch = watch_parent(gone.set, environ=environment, poll_seconds=0.01, grace_seconds=10_000)
    assert watch_parent(never.set, environ=environment, poll_seconds=0.01, grace_seconds=0) is watch
    task.kill()
    task.wait()
    assert gone.wait(WAIT_SECONDS)
    assert not never.is_set()


def test_without_an_own_way_to_stop_the_driver_gets_sigterm(task: subprocess.Popen[bytes]) -> None:
    watched = driver(TERMINATED, task)
    task.kill()
    watched.communicate(timeout=WAIT_SECONDS)
    task.wait()
    assert watched.returncode == -signal.SIGTERM


def test_another_process_with_the_same_id_is_not_the_task() -> None:
    gone = threading.Event()
    environment = {**parent_environment(), PARENT_START: "1"}
    watch_parent(gone.set, environ=environment, poll_seconds=0.01, grace_seconds=10_000)
    assert gone.wait(WAIT_SECONDS)


def test_a_driver_started_from_a_shell_is_not_watched() -> None:
    assert watch_parent(lambda: None, environ={}) is None
