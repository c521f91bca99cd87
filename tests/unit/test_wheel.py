"""`make dist`: what it makes, installed beside Airflow and Spark, is found by them without a checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fixtures.installed import ROOT, distributions, install

PAGE = "headwater_airflow/page/static"

FOUND = """
import json, runpy
from pathlib import Path
import headwater
from headwater.demo.airflow_server import checkout, example_dags
from headwater_airflow.operators.spark import entry_script
dags = {
    name for file in sorted(example_dags().glob("*.py"))
    for value in runpy.run_path(str(file)).values() if isinstance(name := getattr(value, "dag_id", None), str)
}
jobs = ("load", "replicate", "reload", "rebuild", "verify", "validate", "maintain", "dbt", "example_aggregate")
scripts = {job: entry_script(job) for job in jobs if Path(entry_script(job)).is_file()}
found = {"package": headwater.__file__, "checkout": checkout() is not None, "dags": sorted(dags), "scripts": scripts}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With `dist`, and an environment in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("installed")
    _, wheel = distributions(folder / "dist")
    install(wheel, folder / "environment")
    return folder


def run(folder: Path, program: str, *arguments: str, **environment: str) -> str:
    """What a program of the environment prints; nothing leads it to the checkout."""
    programs = folder / "environment" / "bin"
    done = subprocess.run(
        [programs / program, *arguments],
        env={"PATH": f"{programs}:{os.defpath}", "AIRFLOW_HOME": str(folder / "airflow"), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_dags_and_their_jobs_are_found_without_a_checkout(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.yaml").write_text(
        "pipeline: shop\nsource: {connection: 'postgresql://nobody@127.0.0.1:1/nowhere'}\n"
        f"lake: {{root: 'file://{tmp_path}/lake'}}\ntables: [public.a]\n"
    )
    answer = run(folder, "python", "-c", FOUND, HEADWATER_PIPELINES=str(tmp_path))
    found = json.loads(answer.strip().splitlines()[-1])
    assert found["checkout"] is False
    assert len(found["scripts"]) == 9
    places = [found["package"], *found["scripts"].values()]
    assert all(Path(place).is_relative_to(folder / "environment") for place in places), places
    jobs = ("load", "maintain", "reload", "replicate", "resume", "validate", "verify")
    assert found["dags"] == ["headwater_example_downstream", *(f"shop.{job}" for job in jobs)]


def test_airflow_lists_the_provider_and_the_plugin_and_the_command_starts(folder: Path) -> None:
    def listed(*command: str) -> list[dict[str, Any]]:
        answer = run(folder, "airflow", *command, "--output", "json")
        return list(json.loads(answer[answer.index("[{") :]))

    provider = [found for found in listed("providers", "list") if found["package_name"] == "headwater"]
    assert [found["version"] for found in provider] == ["0.1.0"]
    plugin = [found for found in listed("plugins") if found["name"] == "headwater"]
    assert [app["url_prefix"] for app in plugin[0]["fastapi_apps"]] == ["/headwater"]
    assert "replicate" in run(folder, "headwater", "--help")


def test_the_wheel_holds_the_pages_with_their_scripts_and_styles(folder: Path) -> None:
    (wheel,) = folder.glob("dist/*.whl")
    held = {name.removeprefix(f"{PAGE}/") for name in zipfile.ZipFile(wheel).namelist() if name.startswith(PAGE)}
    assert {"index.html", "page.js", "page.css"} <= held
    page = ROOT / "plugins" / PAGE
    assert held == {str(file.relative_to(page)) for file in page.rglob("*") if file.is_file()}


def test_the_source_distribution_holds_what_the_compose_file_needs(folder: Path) -> None:
    (source,) = folder.glob("dist/*.tar.gz")
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"docker/compose.yaml", "docker/Dockerfile", "docker/.env.example", "requirements/runtime.txt", "Makefile"}
    assert needed <= held


def test_the_image_gets_the_versions_that_the_tests_run_with() -> None:
    def pinned(name: str) -> set[str]:
        text = (ROOT / "requirements" / name).read_text().replace("\\\n", "")
        return {" ".join(line.split()) for line in text.splitlines() if line}

    assert pinned("runtime.txt") <= pinned("dev.txt")


def test_what_is_pinned_names_versions_and_digests_and_no_address() -> None:
    pins = [*(ROOT / "requirements").glob("*.txt"), *(ROOT / "spark_jobs").rglob("*_jars.txt")]
    pins += [ROOT / "tests" / "servers" / name for name in ("go.mod", "go.sum", "azurite/package-lock.json")]
    assert len(pins) >= 7
    assert [pin.name for pin in pins if re.search(r"\bhttps?://", pin.read_text())] == []
