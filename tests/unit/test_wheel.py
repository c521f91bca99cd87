"""Headwater as an installed package: what the wheel holds is enough, no checkout stands beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

INSTALLED = """
import json, runpy, sys
from pathlib import Path
import headwater
from headwater.jobs.demo.airflow_server import checkout, example_dags
from headwater_airflow.operators.spark import entry_script
dags = {
    name for file in sorted(example_dags().glob("*.py"))
    for value in runpy.run_path(str(file)).values() if isinstance(name := getattr(value, "dag_id", None), str)
}
jobs = ("load", "replicate", "verify", "validate", "maintain", "example_aggregate")
scripts = {job: Path(entry_script(job)).is_file() for job in jobs}
found = {"package": headwater.__file__, "checkout": checkout() is not None, "dags": sorted(dags), "scripts": scripts}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content, as an installer would lay it out."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_the_pages_with_their_scripts_and_styles(site: Path) -> None:
    page = Path("headwater_airflow/page/static")
    held = {file.name for file in (site / page).iterdir()}
    assert {"index.html", "page.js", "page.css"} <= held
    assert held == {file.name for file in (ROOT / "plugins" / page).iterdir()}


def run(site: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(site), **environment},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_dags_and_their_jobs_are_found_without_a_checkout(site: Path, tmp_path: Path) -> None:
    pipelines = tmp_path / "pipelines"
    pipelines.mkdir()
    (pipelines / "shop.yaml").write_text(
        "pipeline: shop\nsource: {connection: 'postgresql://nobody@127.0.0.1:1/nowhere'}\n"
        f"lake: {{root: 'file://{tmp_path}/lake'}}\ntables: [public.a]\n"
    )
    found = json.loads(
        run(site, "-c", INSTALLED, HEADWATER_PIPELINES=str(pipelines), AIRFLOW_HOME=str(tmp_path / "airflow"))
        .strip()
        .splitlines()[-1]
    )
    assert Path(found["package"]).is_relative_to(site)
    assert found["checkout"] is False
    of_the_pipeline = [f"shop.{job}" for job in ("load", "maintain", "reload", "replicate", "validate")]
    assert found["dags"] == ["headwater_example_downstream", *of_the_pipeline]
    assert all(found["scripts"].values()), found["scripts"]


def test_the_command_starts_and_airflow_would_find_plugin_and_provider(site: Path) -> None:
    assert "replicate" in run(site, "-m", "headwater.cli", "--help")
    (file,) = site.glob("headwater-*.dist-info/entry_points.txt")
    points = ConfigParser()
    points.read(file)
    assert dict(points["console_scripts"]) == {"headwater": "headwater.cli:main"}
    assert points["airflow.plugins"]["headwater"] == "headwater_airflow.plugin:HeadwaterPlugin"
    assert points["apache_airflow_provider"]["provider_info"] == "headwater_airflow.provider_info:get_provider_info"
