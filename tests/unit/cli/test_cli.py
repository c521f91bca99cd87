"""The command line: parsing, errors, and how little it imports."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pytest

from fixtures.lakes import HandLake, position_at
from headwater import cli
from headwater.cli.arguments import EXAMPLES, parser
from headwater.errors import HeadwaterError, SourceUnreachable
from headwater.gate.check import CheckReport
from headwater.pipeline_file.pipeline import load_pipeline
from headwater.pipeline_file.values import LIBPQ_SECRETS
from headwater.source.catalog.catalog import Catalog
from headwater.source.problems import warning
from headwater.terminal.render import render
from headwater.terminal.scrub import Scrubber

SECRET = "hunter2'hidden"
HEAVY = ("pyspark", "pandas", "pyarrow", "deltalake", "numpy")


@pytest.fixture
def pipeline_file(tmp_path: Path) -> Path:
    """A pipeline whose source nobody listens at: port 1 of this machine."""
    file = tmp_path / "shop.yaml"
    file.write_text(
        "pipeline: shop\n"
        "source: {connection: 'postgresql://shop:hunter2%27hidden@127.0.0.1:1/shop?connect_timeout=2'}\n"
        f"lake: {{root: '{tmp_path}/lake'}}\n"
        "tables: [public.orders]\n"
    )
    return file


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`headwater` in a process of its own, as a person starts it."""
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-m", "headwater.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path, **environ},
        check=False,
    )


@pytest.mark.parametrize(
    ("found", "status"),
    [
        ({}, 0),
        ({"unsettled": 3}, 0),  # keys that go on changing
        ({"different": 2}, 5),
        ({"different": 2, "repaired": 2}, 0),
        ({"unsettled": 250_000, "more": 250_000}, 5),
        ({"different": 100_000, "repaired": 100_000, "more": 250_000}, 5),
        ({"compared": False}, 4),
    ],
)
def test_a_verify_is_done_when_no_key_is_left_that_differs_or_that_nobody_has_looked_at(
    pipeline_file: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, object], status: int
) -> None:
    table = {"missing": 0, "extra": 0, "different": 0, "repaired": 0, "rows": 1, "keys": [], **found}
    result = {"position": None, "epoch": 1, "tables": {"public.orders": table}}
    monkeypatch.setattr("headwater.verify.verify.verify", lambda *given, **named: result)
    assert cli.main(["verify", str(pipeline_file), "--json"]) == status


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["rewind", "x.yaml", "--table", "public.a"],  # a command of a later issue
        ["check"],
        ["check", "x.yaml", "--nope"],
        ["verify", "x.yaml", "--repairs"],
        ["load", "x.yaml", "--tab", "public.a"],  # no abbreviations: they change meaning with the next option
        ["load", "x.yaml", "--table", "public.order lines"],
        ["replicate", "x.yaml", "--until", "tomorrow"],
        ["replicate", "x.yaml", "--max-seconds", "-1"],
        ["replicate", "x.yaml", "--overtime", "soon"],
        ["wait", "x.yaml", "--require", "soon"],
        ["wait", "x.yaml", "--require", "xyz/1"],
        ["wait", "x.yaml", "--timeout", "1w"],
        ["status", "x.yaml", "--table", "public.a"],
        ["reload", "x.yaml", "--change"],
        ["init", "x.yaml", "--source", "neither URI nor keys"],
        ["init", "x.yaml", "--lake", "hdfs://host/lake"],
        ["init", "x.yaml", "--name", "No Name"],
        ["init", "x.yaml", "--table", "orders"],
    ],
)
def test_what_is_not_understood_is_refused_with_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: headwater" in err


def test_a_usage_error_is_an_error_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["wait", "x.yaml", "--json", "--require", "soon"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert set(error) == {"code", "message", "where", "remedy"}
    assert "--require" in error["message"]


def test_a_bare_headwater_shows_its_commands_and_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    shown = capsys.readouterr().err
    assert all(command in shown for command in EXAMPLES)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwater {version('headwater')}\n"


def test_help_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("init", "check", "load", "replicate", "wait", "status", "verify", "drop", "demo"):
        assert command in out


def test_a_bad_pipeline_file_is_an_error_object_and_a_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("pipeline: shop\nwal: 1\n")
    assert cli.main(["status", str(file), "--json"]) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["code"] == "bad_configuration"
    assert error["where"] == str(file)
    assert "wal: unknown key" in error["message"]
    assert "wal: unknown key" in err


def test_check_lists_the_faults_of_a_bad_file_as_its_problems(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("pipeline: shop\nwal: 1\n")
    assert cli.main(["check", str(file), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    wal = next(problem for problem in report["problems"] if "wal" in problem["message"])
    assert wal["where"] == f"{file}:2"
    assert wal["severity"] == "error"


def test_check_names_the_real_file_in_its_remedies(
    capsys: pytest.CaptureFixture[str], pipeline_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = warning("option_waits_for_load", "public.orders", "it waits", "headwater load PIPELINE.yaml --again")
    monkeypatch.setattr("headwater.gate.check.check", lambda pipeline: CheckReport((found,), Catalog((), ())))
    assert cli.main(["check", str(pipeline_file), "--json"]) == 0
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["remedy"] == f"headwater load {pipeline_file} --again"


def test_a_table_that_was_not_compared_shows_why_and_no_numbers() -> None:
    none = dict.fromkeys(("missing", "extra", "different", "repaired"), 0)
    table = {**none, "rows": None, "compared": False, "state": "suspended", "reason": "column x was dropped"}
    out = io.StringIO()
    render("verify", {"tables": {"public.orders": table}}, out)
    assert out.getvalue().splitlines()[-1] == "public.orders: not compared: it is suspended: column x was dropped"
    assert "0" not in out.getvalue()


@pytest.mark.parametrize(
    ("found", "columns"),
    [
        ({"unsettled": 0}, ""),
        ({"unsettled": 37}, " unsettled"),
        ({"unsettled": 150000, "more": 150000}, " unsettled not looked at"),
    ],
)
def test_keys_that_are_not_known_to_be_equal_are_shown_where_there_are_any(found: dict[str, int], columns: str) -> None:
    none = dict.fromkeys(("rows", "missing", "extra", "different", "repaired"), 0)
    out = io.StringIO()
    render("verify", {"tables": {"public.orders": {**none, "compared": True, **found}}}, out)
    headings, row = (line.split() for line in out.getvalue().splitlines()[:2])
    assert " ".join(headings) == f"table rows missing extra different repaired{columns}"
    assert row == ["public.orders", *"00000", *(str(number) for number in found.values() if number)]


def test_a_reload_says_why_a_table_was_not_compared_and_why_it_was_written_anew() -> None:
    tables = {
        "public.orders": {"reasons": ["it is suspended"], "compared": False, "reason": "it was locked for 30 s"},
        "public.items": {"reasons": ["it is suspended"], "written_anew": "its columns changed"},
    }
    out = io.StringIO()
    render("reload", {"tables": tables}, out)
    assert "public.orders: reason: it was locked for 30 s" in out.getvalue().splitlines()
    assert "public.items: written anew: its columns changed" in out.getvalue().splitlines()


@pytest.mark.parametrize("command", ["load", "verify"])
def test_a_table_outside_the_pipeline_is_refused(
    capsys: pytest.CaptureFixture[str], pipeline_file: Path, command: str
) -> None:
    assert cli.main([command, str(pipeline_file), "--json", "--table", "Orders", "--table", 'public."Nope"']) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "not_replicated"
    assert error["message"].startswith('public."Nope": ')


def test_overtime_is_of_a_slice(pipeline_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replicate", str(pipeline_file), "--overtime", "60"]) == 2
    assert "--overtime goes with --max-seconds" in capsys.readouterr().err


def test_nothing_but_the_json_object_reaches_stdout_and_no_password_anything(pipeline_file: Path) -> None:
    done = run("drop", str(pipeline_file), "--json", HEADWATER_DEBUG="1")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "source_unreachable"
    assert "Traceback" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_an_unreachable_source_is_3_for_wait_and_1_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    error = SourceUnreachable("nobody listens")
    for command, expected in (("wait", 3), ("status", 1)):
        args = parser().parse_args([command, "x.yaml"])
        assert cli._report(error, args, Scrubber(), sys.stdout) == expected
    assert "nobody listens" in capsys.readouterr().err


def test_a_sentence_keeps_its_colons_and_needs_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli._report(SourceUnreachable("nobody listens", where="PostgreSQL at ::1:5432"), None, Scrubber(), sys.stdout)
    assert capsys.readouterr().err == "headwater: PostgreSQL at ::1:5432: nobody listens\n"


def test_a_table_for_a_reader_that_has_gone_is_no_failure() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    out = os.fdopen(writing, "w")
    with pytest.raises(BrokenPipeError):
        render("check", {"ok": True, "problems": []}, out)
    with pytest.raises(BrokenPipeError):
        out.close()  # what it holds still


def test_an_unexpected_error_is_one_sentence_without_the_password(capsys: pytest.CaptureFixture[str]) -> None:
    scrubber = Scrubber()
    scrubber.learn("postgresql://shop:hunter2%27hidden@db/shop")
    args = parser().parse_args(["status", "x.yaml", "--json"])
    text = f"cannot use {SECRET}, hunter2%27hidden, password='other' or postgres://a:b@c/d"
    assert cli._report(RuntimeError(text), args, scrubber, sys.stdout) == 1
    out, err = capsys.readouterr()
    message = json.loads(out)["error"]["message"]
    assert message == "RuntimeError: cannot use ***, ***, password=*** or postgres://a:***@c/d"
    assert "hunter2" not in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("option", LIBPQ_SECRETS)
def test_every_secret_of_a_connection_string_is_taken_out_of_texts(option: str) -> None:
    scrubber = Scrubber()
    scrubber.learn(f"host=db {option}=hunter2")
    assert scrubber.scrub("it was hunter2") == "it was ***"
    ours = "write postgresql://user:password@host:port/database or host=... password=..."
    assert scrubber.scrub(ours) == ours
    assert Scrubber().scrub(f"host=db {option}=hunter2 x") == f"host=db {option}=*** x", "one that was never learned"


@pytest.mark.parametrize("level", ["LOUD", ""])
def test_an_unknown_log_level_is_said_and_ends_no_command(pipeline_file: Path, level: str) -> None:
    done = run("waits", str(pipeline_file), "--json", HEADWATER_LOG=level)
    assert (done.returncode, json.loads(done.stdout)["waits"]) == (0, [])
    assert ("HEADWATER_LOG is no level" in done.stderr) == bool(level)


def test_a_look_back_beyond_all_dates_is_refused(pipeline_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for last in ("99999999999d", "999999d"):
        assert cli.main(["waits", str(pipeline_file), "--last", last, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage"


def test_a_store_that_is_away_is_the_lake_s_outage(capsys: pytest.CaptureFixture[str]) -> None:
    args = parser().parse_args(["load", "x.yaml", "--json"])
    away = OSError(errno.EIO, "Generic S3 error: connection refused", "s3://analytics/shop/_headwater/tables")
    assert cli._report(away, args, Scrubber(), sys.stdout) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["where"]) == ("lake_unavailable", "s3://analytics/shop/_headwater/tables")
    assert "connection refused" in error["message"]
    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/spill")
    assert cli._report(full, args, Scrubber(), sys.stdout) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "unexpected"


@pytest.mark.parametrize("command", ["status", "pause"])
def test_a_lake_that_this_user_may_not_use_is_refused(
    pipeline_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    place, elsewhere = f"{load_pipeline(str(pipeline_file)).lake_path()}/_headwater/ledger/a.parquet", "/no/lake/a"
    for named in (place, elsewhere):
        message = f"Failed to open local file '{named}'. Detail: [errno 13] Permission denied"
        fail = Mock(side_effect=PermissionError(errno.EACCES, message))
        monkeypatch.setitem(cli.commands._COMMANDS, command, fail)
        status = cli.main([command, str(pipeline_file), "--json"])
        told = json.loads(capsys.readouterr().out)["error"]
        expected = (2, "lake_not_writable") if named == place else (1, "unexpected")
        assert (status, told["code"], named in told["message"]) == (*expected, True)


@pytest.mark.parametrize(
    "error",
    [
        OSError("Couldn't deserialize thrift"),
        TimeoutError("timed out"),
        FileNotFoundError(errno.ENOENT, "No such file", "ca.pem"),
    ],
)
def test_an_error_that_names_no_place_in_a_store_is_none_of_the_store_s(
    capsys: pytest.CaptureFixture[str], error: OSError
) -> None:
    assert cli._report(error, parser().parse_args(["load", "x.yaml", "--json"]), Scrubber(), sys.stdout) == 1
    told = json.loads(capsys.readouterr().out)["error"]
    assert told["code"] == "unexpected"
    assert str(error) in told["message"]


def test_the_exit_status_of_an_error_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(HeadwaterError):
        exit_status = 4

    assert cli._report(Odd("x"), parser().parse_args(["load", "x.yaml"]), Scrubber(), sys.stdout) == 4
    assert capsys.readouterr().err == "headwater load: x\n"


@pytest.mark.parametrize("command", EXAMPLES)
def test_every_command_shows_examples_that_it_understands(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out.partition("examples:\n")[2].strip().splitlines()
    assert shown
    for line in shown:
        words = shlex.split(re.split(r" [|>] ", line)[0], comments=True)
        assert words[:2] == ["headwater", command]
        assert parser().parse_args(words[1:]).command == command


def test_every_command_takes_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    commands = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert {*EXAMPLES, "demo"} == set(commands)
    for command in commands:
        assert cli.main([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("headwater st", {"status"}),
        ("headwater wait --requ", {"--require"}),
        ("headwater drop ", {"shop.yaml"}),
        ("headwater load shop.yaml --table public.o", {"public.orders", "public.other"}),
    ],
)
def test_the_shell_completes_commands_options_files_and_tables(tmp_path: Path, line: str, expected: set[str]) -> None:
    text = "pipeline: shop\nsource: {connection: '${NOT_SET}'}\ntables: [public.orders, {name: public.other}, shop.*]\n"
    (tmp_path / "shop.yaml").write_text(text)
    (tmp_path / "notes.txt").touch()
    asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE": "1"}
    answer = tmp_path / "answer"
    subprocess.run(
        [sys.executable, "-m", "headwater.cli"],
        cwd=tmp_path,
        env={
            **os.environ,
            **asked,
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        timeout=60,
        check=True,
    )
    assert {word.strip() for word in answer.read_text().split("\n")} - {"--help", "-h", "--json"} == expected


def test_the_help_says_what_the_statuses_of_status_and_reload_are() -> None:
    said = " ".join(parser().format_help().split())
    assert "3 not fresh in time (status --exit-code: late, stopped or paused)" in said
    assert "(status --exit-code: degraded)" in said
    assert "reload --changed left something as it is" in said


@pytest.mark.parametrize("arguments", [["--help"], ["check", "--help"], ["wait", "--help"]])
def test_help_imports_neither_an_engine_nor_the_file_reader(arguments: list[str]) -> None:
    assert _imported(arguments, (*HEAVY, "pydantic", "psycopg", "yaml", "rich")) == []


@pytest.mark.parametrize("command", ["check", "drop", "init"])
def test_commands_for_people_start_without_an_engine(pipeline_file: Path, command: str) -> None:
    assert _imported([command, str(pipeline_file)], ("pyspark", "pandas", "deltalake", "pyarrow")) == []


@pytest.mark.parametrize("command", ["wait", "status", "doctor"])
def test_commands_that_poll_the_lake_start_without_spark(pipeline_file: Path, command: str) -> None:
    """Also where there are rows to read, which pyarrow makes lists of."""
    pipeline = load_pipeline(pipeline_file)
    lake = HandLake(pipeline.lake_path(), position_at(), ["public.orders"])
    lake.publish(0x2000, "public.orders")
    arguments = [command, str(pipeline_file), *(["--timeout", "0s"] if command == "wait" else [])]
    assert _imported(arguments, ("pyspark", "py4j", "pandas", "delta", "multiprocessing.process")) == []


def _imported(arguments: list[str], modules: tuple[str, ...]) -> list[str]:
    """Which of `modules` a run of the command line imports."""
    program = (
        "import json, sys; from headwater.cli import main; "
        f"main({arguments!r}); print('\\n' + json.dumps([m for m in {modules!r} if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found
