"""Makes the environment of this checkout: `.venv` from the hashed requirement files, the project itself, the jars.

Run by `make setup`, with nothing but Python's standard library. A stamp in `.venv` holds the digest of everything
that was installed: when it fits, there is nothing to do. A lock makes a second, concurrent run wait for the first,
and the stamp is written last, so a run that was killed is simply done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".headwater-installed"
INPUTS = ("requirements/bootstrap.txt", "requirements/dev.txt", "requirements/install.py", "pyproject.toml")


def digest() -> str:
    """Of the inputs, the Python, and the place: an environment cannot be moved."""
    state = hashlib.sha256(f"{sys.version}\n{ROOT}\n".encode())
    for name in INPUTS:
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT)


def install() -> None:
    wanted = digest()
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.exists():
        return
    STAMP.unlink(missing_ok=True)
    # An environment copied from elsewhere runs its old home's Python: it is made anew.
    moved = VENV.is_dir() and not (VENV / "pyvenv.cfg").is_file()
    run(sys.executable, "-m", "venv", *(["--clear"] if moved else []), VENV)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--require-hashes", "-r", "requirements/bootstrap.txt")
    uv = (PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--quiet")
    # Compiled once and here: else each of the first commands compiles what it imports, and all of them do where
    # Python may not write beside its sources (1.2 instead of 0.6 CPU-seconds for `headwater status`).
    run(*uv, "--compile-bytecode", "--require-hashes", "-r", "requirements/dev.txt")
    run(*uv, "--no-build-isolation", "--no-deps", "--editable", ".")
    STAMP.write_text(wanted)


def main() -> int:
    with (ROOT / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            install()
            run(PYTHON, "-m", "headwater.jars")
        except subprocess.CalledProcessError as error:
            print(f"set-up failed in: {' '.join(error.cmd)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    raise SystemExit(main())
