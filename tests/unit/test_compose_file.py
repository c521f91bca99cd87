"""docker/compose.yaml as Compose itself reads it, and the settings that it asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fixtures.compose import DOCKER, example_settings, services


def test_the_example_settings_are_those_that_the_file_uses() -> None:
    used = set(re.findall(r"\$\{(\w+)", (DOCKER / "compose.yaml").read_text()))
    assert used | {"COMPOSE_PROJECT_NAME"} == set(example_settings())


def test_images_are_pinned_and_nobody_is_root() -> None:
    found = services(example_settings())
    images = {service["image"] for service in found.values()}
    for file in (DOCKER / "Dockerfile", DOCKER / "Dockerfile.object-store"):
        bases = re.findall(r"^FROM (\S+)", file.read_text(), re.MULTILINE)
        assert bases
        assert all(re.search(r":\d+\.\d+", image) for image in [*images, *bases]), (images, bases)
        users = re.findall(r"^USER (\S+)$", file.read_text(), re.MULTILINE)
        assert users[-1:] == ["50000"]
    assert all(service.get("user") == "postgres" for service in found.values() if "postgres:" in service["image"])


def test_the_linter_of_compose_files_finds_nothing() -> None:
    linter = [sys.executable, "-m", "compose_lint", "check", "--fail-on", "low", "--strict-config", "--no-pager"]
    found = subprocess.run([*linter, "compose.yaml"], cwd=DOCKER, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_compose_accepts_the_file_and_names_the_settings_that_are_missing(tmp_path: Path) -> None:
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("there is no docker-compose (Debian's package of that name needs no engine for this)")
    command = [program, "--file", str(DOCKER / "compose.yaml")]
    settings = ["--env-file", str(DOCKER / ".env.example")]
    read = subprocess.run([*command, *settings, "config"], env={}, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert set(yaml.safe_load(read.stdout)["services"]) == set(services(example_settings()))
    (tmp_path / "env").touch()
    nothing = ["--env-file", str(tmp_path / "env")]
    refused = subprocess.run([*command, *nothing, "config"], env={}, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "copy docker/.env.example to docker/.env" in refused.stderr
