"""Makes the servers of the tests in `.servers`: an S3, an Azure and a Google Cloud storage, and a faulty network.
Beside them an environment with dbt and notebooks, which read the lake as their users do.

Run by `make servers`, with nothing but Python's standard library and uv. Versions and digests are pinned by `go.sum`
and `azurite/package-lock.json`, beside this file, and by `requirements/analysis.txt`. A part is made anew when its pins
have changed; its stamp is written last and the whole part then put in its place, so a run that was killed is simply
done again, and one beside another waits. Without Go or Node it says so and makes the rest: the tests of what is missing
are skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
ROOT = SOURCES.parents[1]
FOLDER = ROOT / ".servers"

VERSITYGW = FOLDER / "go" / "versitygw"
GCS = FOLDER / "go" / "gcs"
TOXIPROXY = FOLDER / "go" / "toxiproxy"
AZURITE = FOLDER / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
ANALYSIS = FOLDER / "analysis" / "bin"
"""Programs of an environment beside Airflow's: `dbt`, `papermill`, `python`."""

_PACKAGES = {
    VERSITYGW: "github.com/versity/versitygw/cmd/versitygw",
    TOXIPROXY: "github.com/Shopify/toxiproxy/v2/cmd/server",
    GCS: "./gcs",
}
_OF_AZURITE = ("package.json", "package-lock.json", ".npmrc", "no-telemetry/package.json", "no-telemetry/index.js")


def go_servers(place: Path) -> None:
    for program, package in _PACKAGES.items():
        # A changed go.sum would be a changed pin: Go must not mend it by itself.
        build = ("go", "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", place / program.name, package)
        _run(*build, cwd=SOURCES)


def azurite(place: Path) -> None:
    for name in _OF_AZURITE:
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(SOURCES / "azurite" / name, place / name)
    # Azurite asks for Node 22 and serves with 18: not worth a warning for each of its parts.
    _run("npm", "ci", "--loglevel=error", "--ignore-scripts", cwd=place)


def analysis(place: Path) -> None:
    """An environment of its own, but for Spark, of which one build in the checkout is enough."""
    uv = (sys.executable, "-m", "uv", "--quiet")
    _run(*uv, "venv", "--relocatable", "--python", sys.executable, "--allow-existing", place, cwd=ROOT)
    pins = ("--require-hashes", "-r", "requirements/analysis.txt")
    _run(*uv, "pip", "install", "--python", place / "bin" / "python", *pins, cwd=ROOT)
    modules = Path(sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)}))
    (modules / "headwater.pth").write_text(f"{ROOT / 'spark_jobs'}\n")
    for name in ("pyspark", "delta", "py4j"):
        (modules / name).symlink_to(Path(sysconfig.get_path("purelib")) / name)


def missing_go() -> str:
    """What is said of it; empty: it is there and new enough."""
    if shutil.which("go") is None:
        return "Go is not installed"
    wanted = re.search(r"^go (\d+)\.(\d+)", (SOURCES / "go.mod").read_text(), re.MULTILINE)
    assert wanted is not None
    # Asked here, where a Go that fetches the version that a module wants has done so.
    answer = subprocess.run(["go", "version"], cwd=SOURCES, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\bgo(\d+)\.(\d+)", answer)
    if found is None or [int(part) for part in found.groups()] < [int(part) for part in wanted.groups()]:
        return f"Go {'.'.join(wanted.groups())} or newer is not installed"
    return ""


def missing_node() -> str:
    absent = [name for name in ("node", "npm") if shutil.which(name) is None]
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed" if absent else ""


def install(name: str, inputs: list[Path], missing: Callable[[], str], make: Callable[[Path], None]) -> None:
    """The part `name` of the folder, if it is not there as its inputs say."""
    part, new = FOLDER / name, FOLDER / f"{name}.new"
    state = hashlib.sha256()
    for file in inputs:
        state.update(file.read_bytes())
    stamp = part / ".made-from"
    if stamp.is_file() and stamp.read_text() == state.hexdigest():
        return
    if sentence := missing():
        shutil.rmtree(part, ignore_errors=True)  # of other pins
        print(f"{sentence}: the tests that need the servers made with it ({name}) are skipped")
        return
    print(f"making the servers of the tests: {name}", flush=True)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    make(new)
    (new / stamp.name).write_text(state.hexdigest())
    shutil.rmtree(part, ignore_errors=True)
    new.rename(part)


def _run(*command: str | Path, cwd: Path) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd)


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    own = Path(__file__).resolve()
    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            sources = [SOURCES / "go.mod", SOURCES / "go.sum", SOURCES / "gcs" / "main.go", own]
            install("go", sources, missing_go, go_servers)
            install("azurite", [*(SOURCES / "azurite" / name for name in _OF_AZURITE), own], missing_node, azurite)
            install("analysis", [ROOT / "requirements" / "analysis.txt", own], lambda: "", analysis)
        except subprocess.CalledProcessError as error:
            print(f"the servers of the tests could not be made: {' '.join(error.cmd)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
