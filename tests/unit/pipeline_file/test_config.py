"""The pipeline file: what may stand in it, and one error for all that may not."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import NoReturn

import pytest

from headwater import store_options
from headwater.errors import EXIT_REFUSED, BadConfiguration, Refused, Transient
from headwater.names import TableName, TablePattern
from headwater.pipeline_file.pipeline import BadPipelineFile, Pipeline, load_pipeline

SECRET = "hunter2-hidden"
ENVIRON = {"SOURCE": f"postgresql://shop:{SECRET}@db:5432/shop"}
HEAD = "pipeline: shop\nsource: {connection: '${SOURCE}'}\nlake: {root: file:///data/lake}\n"


def read(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> Pipeline:
    file = tmp_path / "shop.yaml"
    file.write_text(text)
    return load_pipeline(file, ENVIRON if environ is None else environ)


def refused(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> str:
    """What the file is refused with; never holding the secret."""
    with pytest.raises(BadConfiguration) as error:
        read(tmp_path, text, environ)
    assert error.value.exit_status == EXIT_REFUSED
    assert SECRET not in str(error.value)
    assert SECRET not in repr(error.value)
    return str(error.value)


def test_a_short_file_gets_every_default(tmp_path: Path) -> None:
    pipeline = read(tmp_path, HEAD + "tables: [public.orders]\n")
    assert pipeline.name == "shop"
    assert (pipeline.source.publication, pipeline.source.slot) == ("headwater_shop", "headwater_shop")
    assert (pipeline.source.failover, pipeline.source.on_timeline_change) == ("auto", "refuse")
    assert pipeline.lake.keep_cuts == 3600
    assert (pipeline.load.connections, pipeline.load.wait_for_old_transactions) == (2, 600)
    replicate = pipeline.replicate
    assert (replicate.max_rows, replicate.max_bytes) == (500_000, 256 * 1024**2)
    assert (replicate.max_seconds, replicate.memory) == (1, 1024**3)
    assert (pipeline.defaults.on_bad_value, pipeline.defaults.on_divergence) == ("suspend", "suspend")
    assert pipeline.tables[0].name == TableName("public", "orders")
    assert (pipeline.tables[0].key, pipeline.tables[0].types, pipeline.tables[0].partition_by) == (None, {}, ())
    assert pipeline.file == str(tmp_path / "shop.yaml")
    assert pipeline.conninfo() == ENVIRON["SOURCE"]
    assert pipeline.lake_path() == "/data/lake"


def test_a_long_entry_takes_its_options(tmp_path: Path) -> None:
    entry = read(
        tmp_path,
        HEAD
        + """
tables:
  - name: public."Order Lines"
    key: [Id, '"No"']
    types: {amount: "decimal(38, 9)", tags: string}
    partition_by: [region]
    insert_only: false
    on_bad_value: {created: null, amount: "null", x: string}
    on_divergence: report
""",
    ).tables[0]
    assert entry.name == TableName("public", "Order Lines")
    assert entry.key == ("id", "No")
    assert entry.types == {"amount": "decimal(38,9)", "tags": "string"}
    assert entry.partition_by == ("region",)
    assert entry.insert_only is False
    assert entry.on_bad_value == {"created": "null", "amount": "null", "x": "string"}
    assert entry.on_divergence == "report"


def test_a_table_is_clustered_by_some_columns_and_not_partitioned_besides(tmp_path: Path) -> None:
    entry = read(tmp_path, HEAD + "\ntables:\n  - name: public.t\n    cluster_by: [Region, '\"A day\"']\n").tables[0]
    assert entry.cluster_by == ("region", "A day")
    both = "\ntables:\n  - name: public.t\n    partition_by: [r]\n    cluster_by: [a, b, c, d, e]\n"
    with pytest.raises(BadPipelineFile) as caught:
        read(tmp_path, HEAD + both)
    assert "tables[0].cluster_by: not possible beside partition_by" in str(caught.value)
    assert "tables[0].cluster_by: names 5 columns; at most 4 are possible" in str(caught.value)
    with pytest.raises(BadPipelineFile, match="not possible for a pattern"):
        read(tmp_path, HEAD + "\ntables:\n  - name: public.t*\n    cluster_by: [a]\n")


@pytest.mark.parametrize("written", ["null", '"null"', "~"])
def test_null_for_a_bad_value_may_stand_with_or_without_quotes(tmp_path: Path, written: str) -> None:
    pipeline = read(
        tmp_path,
        f"{HEAD}defaults: {{on_bad_value: {written}}}\ntables: [{{name: public.a, on_bad_value: {written}}}]\n",
    )
    assert pipeline.defaults.on_bad_value == "null"
    assert pipeline.tables[0].on_bad_value == "null"


@pytest.mark.parametrize("choice", ["auto", "on", "off"])
def test_on_and_off_are_words_not_truth_values(tmp_path: Path, choice: str) -> None:
    head = HEAD.replace("'${SOURCE}'", f"'${{SOURCE}}', failover: {choice}")
    assert read(tmp_path, head + "tables: [public.a]\n").source.failover == choice


def test_a_ceiling_that_is_below_what_any_source_keeps_is_a_forgotten_unit(tmp_path: Path) -> None:
    head = HEAD.replace("'${SOURCE}'", "'${SOURCE}', wal_ceiling: %s")
    with pytest.raises(BadPipelineFile, match=r"source\.wal_ceiling: expected at least 1MiB; a bare number is bytes"):
        read(tmp_path, head % 20 + "tables: [public.a]\n")
    assert read(tmp_path, head % "1MiB" + "tables: [public.a]\n").source.wal_ceiling == 1 << 20


def test_every_fault_is_reported_at_once_with_path_and_line(tmp_path: Path) -> None:
    message = refused(
        tmp_path,
        """pipeline: Shop-1
source:
  connection: ${SOURCE}
  slot: Bad-Slot
  wal_ceiling: none
  on_timeline_change: repair
lake: {root: "s3a://bucket/lake"}
replicate: {max_rows: 0, max_bytes: 10XB, max_seconds: true}
defaults: {on_schema_change: follow}
tables:
  - orders
  - name: public.customers
    columns: {hush: [secret]}
    types: {amount: "decimal(39,9)"}
    key: []
  - public.CUSTOMERS
  - {name: public.log_*, key: [id], exclude: [other.x]}
  - {name: public.z, exclude: [public.y]}
load: {connections: many}
""",
    )
    for expected in (
        "load.connections: expected auto, or a whole number, at least 1; got 'many' (line 19)",
        "pipeline: expected a name of a-z",
        "source.slot: expected 1 to 63 of a-z, 0-9 and _; got 'Bad-Slot' (line 4)",
        "source.wal_ceiling: expected a size",
        "source.on_timeline_change: expected one of: follow, refuse; got 'repair' (line 6)",
        "lake.root: s3a:// is a name that only Hadoop knows; write s3://",
        "replicate.max_rows: expected a whole number, at least 1; got 0 (line 8)",
        "replicate.max_bytes: expected a size",
        "replicate.max_seconds: expected a duration",
        "defaults.on_schema_change: expected one of: evolve, suspend; got 'follow' (line 9)",
        "tables[0]: the schema is missing: write schema.table, for example public.orders; got 'orders' (line 11)",
        "tables[1].columns.hush: unknown key; possible here: exclude, hash, mask",
        "tables[1].types.amount: unknown type",
        "tables[1].key: expected at least one column; got an empty list (line 15)",
        "tables[2]: 'public.CUSTOMERS' is listed twice (first: tables[1], line 12) (line 16)",
        "tables[3].key: not possible for a pattern",
        "tables[3].exclude[0]: 'other.x' is not matched by the pattern anyway",
        "tables[4].exclude: possible only beside a pattern",
    ):
        assert expected in message
    assert "18 problems" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it is empty"),
        ("- a\n- b\n", "found a list"),
        ("just text\n", "found 'just text'"),
        ("pipeline: [\n", "not valid YAML"),
        ("a: 1\n b: 2\n", "not valid YAML"),
        ("pipeline: shop\ntables:\n  - *.orders\n", "in quotes"),
        ("pipeline: a\npipeline: b\n", "pipeline: the key is there twice, first in line 1 (line 2)"),
        ("pipeline: shop\nname: x\n", "name: unknown key"),
        ("pipeline: shop\nfile: x\n", "file: unknown key"),
        ("pipeline: shop\n", "source: is missing"),
        ("pipeline: shop\nsource: {}\n", "source.connection: is missing"),
        (
            HEAD.replace("pipeline: shop", "pipeline: daily_inserts"),
            "source.publication: expected a name that does not",
        ),
        (HEAD.replace("'${SOURCE}'", "'${SOURCE}', publication: x_inserts"), "source.publication: expected a name"),
        ("pipeline: 5\n", "pipeline: expected text, in quotes; got 5 (line 1)"),
        ("pipeline: !!python/name:os.system x\n", "YAML tag that is not understood"),
        (HEAD + "tables: []\n", "tables: expected at least one table"),
        (HEAD + "tables: public.a\n", "tables: expected a list; got 'public.a' (line 4)"),
        (HEAD + "tables: [7]\n", "tables[0]: expected a mapping with the keys name"),
        (HEAD + "tables: &t [public.a, *t]\n", "tables[1]: holds itself"),
        (HEAD + f"tables: {'[' * 2_000}", "nests more than 50 levels deep (line 4)"),
        (HEAD + f"tables: {'[' * 60_000}{']' * 60_000}\n", "nests more than 50 levels deep (line 4)"),
        (
            "a0: &a0 []\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 2_000)),
            "nests more than 50 levels deep",
        ),
        (HEAD + "tables: [{name: public.a, on_bad_value: {x: nope}}]\n", "tables[0].on_bad_value.x: expected one of"),
        (HEAD + "tables: [{name: public.a, types: {A: int, a: int}}]\n", "tables[0].types.a: the same column"),
        (HEAD + "tables: [{name: public.a, key: [a b]}]\n", "tables[0].key[0]: a blank needs double quotes"),
        (HEAD + "tables: [{name: public.a, insert_only: maybe}]\n", "tables[0].insert_only: expected true or false"),
        (HEAD + "tables: [{name: public.a, history: all}]\n", "tables[0].history: expected true or false"),
        (
            HEAD + "tables: [{name: public.a, soft_delete: true, insert_only: true}]\n",
            "tables[0].soft_delete: not possible beside insert_only: such rows are never deleted (line 4)",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_why(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="No such file"):
        load_pipeline(tmp_path / "none.yaml", {})
    with pytest.raises(BadConfiguration, match="directory"):
        load_pipeline(tmp_path, {})


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE])
def test_a_file_whose_folder_does_not_answer_may_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(*arguments: object) -> NoReturn:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("builtins.open", fail)
    with pytest.raises(Transient, match=os.strerror(error)) as raised:
        load_pipeline(tmp_path / "shop.yaml", {})
    monkeypatch.undo()
    assert (raised.value.code, raised.value.where) == ("unreadable_file", str(tmp_path / "shop.yaml"))


@pytest.mark.parametrize("name", ["shop.yaml/inside", "x" * 300, "loop.yaml", "nul\0"])
def test_a_path_at_which_no_file_can_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "shop.yaml").touch()
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    with pytest.raises(BadConfiguration, match="the pipeline file cannot be read"):
        load_pipeline(tmp_path / name, {})


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"pipeline: \xff\xfe\n")
    with pytest.raises(BadConfiguration, match="not valid YAML"):
        load_pipeline(tmp_path / "x.yaml", {})


def test_a_missing_variable_is_named_and_hides_no_other_fault(tmp_path: Path) -> None:
    message = refused(tmp_path, HEAD + "tables: ['${TABLE}', orders]\n", {})
    assert "source.connection: the environment variable SOURCE is not set" in message
    assert "tables[0]: the environment variable TABLE is not set" in message
    assert "tables[1]: the schema is missing" in message
    assert "3 problems" in message


def test_what_came_from_the_environment_is_never_printed(tmp_path: Path) -> None:
    tables = "tables: [{name: '${X}', on_divergence: '${X}', types: {a: '${X}'}}]\nreplicate: {max_rows: '${X}'}\n"
    assert "got '${X}'" in refused(tmp_path, HEAD + tables, {**ENVIRON, "X": SECRET})


def test_numbers_may_come_from_the_environment(tmp_path: Path) -> None:
    text = HEAD + "replicate: {max_rows: '${N}', max_seconds: '${S}', min_seconds: 5s}\ntables: [public.a]\n"
    replicate = read(tmp_path, text, {**ENVIRON, "N": "10", "S": "250ms"}).replicate
    assert (replicate.max_rows, replicate.max_seconds, replicate.min_seconds) == (10, 0.25, 5)


def test_a_dollar_can_be_written(tmp_path: Path) -> None:
    head = HEAD.replace("${SOURCE}", "host=db password=a$b$${c}")
    assert read(tmp_path, head + "tables: [public.a]\n").conninfo() == "host=db password=a$b${c}"


@pytest.mark.parametrize(
    "connection",
    [f"postgresql://shop:{SECRET}@[db/shop", f"host=db passwrd={SECRET}", f"{SECRET}", f"mysql://u:{SECRET}@h/d", "  "],
)
def test_a_connection_string_that_libpq_refuses_is_refused_without_it(tmp_path: Path, connection: str) -> None:
    assert "source.connection: " in refused(tmp_path, HEAD + "tables: [public.a]\n", {"SOURCE": connection})
    assert "source.connection: " in refused(
        tmp_path, HEAD.replace("${SOURCE}", connection) + "tables: [public.a]\n", {}
    )


@pytest.mark.parametrize(
    "head",
    [
        f"source: 'host=h user=u password={SECRET}'\nlake: {{root: 'file:///l'}}",
        f"source: {{connection: '${{SOURCE}}', slot: 'host=h PASSWORD = {SECRET}'}}\nlake: {{root: 'file:///l'}}",
        f"source: {{connection: '${{SOURCE}}'}}\nlake: {{root: 'file:///l', storage: 'secret_access_key={SECRET}'}}",
    ],
)
def test_a_secret_in_the_wrong_place_is_not_printed(tmp_path: Path, head: str) -> None:
    assert SECRET not in refused(tmp_path, f"pipeline: shop\n{head}\ntables: [public.a]\n")


def test_the_connection_is_shown_nowhere(tmp_path: Path) -> None:
    pipeline = read(tmp_path, HEAD + "tables: [public.a]\n")
    for shown in (repr(pipeline), str(pipeline), repr(pipeline.source), pipeline.model_dump_json()):
        assert SECRET not in shown


def test_keys_of_the_file_go_with_none_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "of another account")
    assert read(tmp_path, in_a_store("{account_key: a}", AZURE)).lake_path() == AZURE
    with pytest.raises(
        Refused, match="AZURE_STORAGE_ACCOUNT_KEY of the environment with the keys of the pipeline file"
    ):
        read(tmp_path, in_a_store("{sas_token: a}", AZURE)).lake_path()


@pytest.mark.parametrize("written", ["{airflow: shop-db}", "'airflow:shop-db'", "'airflow: shop-db'"])
def test_an_airflow_connection_is_taken_from_what_the_operator_hands_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    text = HEAD.replace("'${SOURCE}'", written) + "tables: [public.a]\n"
    variable = "HEADWATER_CONNECTION_SHOP_DB"
    monkeypatch.delenv(variable, raising=False)
    pipeline = read(tmp_path, text, {variable: ENVIRON["SOURCE"]})
    assert pipeline.source.airflow_connection == "shop-db"
    assert pipeline.conninfo() == ENVIRON["SOURCE"]
    assert SECRET not in repr(pipeline)
    with pytest.raises(Refused, match=variable):
        read(tmp_path, text).conninfo()
    with pytest.raises(Refused, match="holds no libpq") as error:
        read(tmp_path, text, {variable: SECRET}).conninfo()
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("root", "path"),
    [("file:///data/lake/", "/data/lake"), ("/data/lake", "/data/lake"), ("file:/data/my%20lake", "/data/my lake")],
)
def test_a_local_root_is_a_path(tmp_path: Path, root: str, path: str) -> None:
    assert read(tmp_path, HEAD.replace("file:///data/lake", root) + "tables: [public.a]\n").lake_path() == path


@pytest.mark.parametrize(
    "root",
    ["lake", "./lake", "file://host/lake", "s3a://bucket/l", "abfss://c@a/l", "file:lake", "/a%20b", "file:/a%252Fb"],
)
def test_any_other_root_is_refused(tmp_path: Path, root: str) -> None:
    assert "lake.root: " in refused(tmp_path, HEAD.replace("file:///data/lake", root) + "tables: [public.a]\n")


@pytest.mark.parametrize("root", ["s3://bucket/a#2", "gs://bucket/a?b/c", r"s3://bucket/a\tb", r"s3://bucket/a\x7F"])
def test_a_prefix_that_delta_rs_takes_for_another_one_is_refused(tmp_path: Path, root: str) -> None:
    said = refused(tmp_path, HEAD.replace("file:///data/lake", f'"{root}"') + "tables: [public.a]\n")
    assert "lake.root: expected a prefix without ?, # and control characters" in said


def test_a_folder_of_this_machine_may_have_such_a_name(tmp_path: Path) -> None:
    text = HEAD.replace("file:///data/lake", "'/data/lake#2?'") + "tables: [public.a]\n"
    assert read(tmp_path, text).lake_path() == "/data/lake#2?"


AZURE = "abfss://lake@account.dfs.core.windows.net/shop"


def in_a_store(storage: str, root: str = "s3://lake/shop") -> str:
    return HEAD.replace("{root: file:///data/lake}", f"{{root: '{root}', storage: {storage}}}") + "tables: [public.a]\n"


def test_a_store_is_entered_as_the_file_says_and_no_secret_of_it_is_shown(tmp_path: Path) -> None:
    text = in_a_store("{endpoint: 'http://minio:9000/', region: eu, secret_access_key: '${KEY}', path_style: false}")
    pipeline = read(tmp_path, text, ENVIRON | {"KEY": SECRET})
    options = store_options.of(f"{pipeline.lake_path()}/public/a")
    assert (options.endpoint, options.region, options.path_style) == ("http://minio:9000", "eu", False)
    assert dict(options.secrets) == {"secret_access_key": SECRET}
    for shown in (repr(pipeline), repr(options), pipeline.model_dump_json()):
        assert SECRET not in shown


@pytest.mark.parametrize(
    ("storage", "root", "said"),
    [
        (f"{{endpoint: 'https://key:{SECRET}@minio'}}", "s3://lake", "lake.storage.endpoint: expected http://"),
        ("{endpoint: minio}", "s3://lake", "lake.storage.endpoint: expected http://"),
        (f"{{secret_access_key: [{SECRET}]}}", "s3://lake", "lake.storage.secret_access_key: expected text"),
        (f"{{password: {SECRET}}}", "s3://lake", "lake.storage.password: unknown key"),
        ("{}", f"s3://key:{SECRET}@lake/shop", "lake.root: expected s3://<bucket>"),
        ("{region: eu}", "file:///data/lake", "storage describes an object store, and root is a folder"),
        (
            "{region: eu, path_style: true}",
            "gs://lake/shop",
            "storage.path_style, storage.region: not for a lake in gs://",
        ),
        (f"{{access_key_id: {SECRET}}}", "gs://lake/shop", "storage.access_key_id: not for a lake in gs://"),
        (f"{{account_key: {SECRET}}}", "s3://lake/shop", "storage.account_key: not for a lake in s3://"),
        ("{service_account: /a}", AZURE, "storage.service_account: not for a lake in abfss://"),
    ],
)
def test_what_a_store_cannot_be_entered_with_is_refused(tmp_path: Path, storage: str, root: str, said: str) -> None:
    assert said in refused(tmp_path, in_a_store(storage, root))


@pytest.mark.parametrize(
    ("storage", "root"),
    [
        ("{}", "file:///data/lake"),
        ("{endpoint: 'http://a:1', region: eu, path_style: true, access_key_id: a}", "s3://lake/shop"),
        ("{endpoint: 'http://a:1', account_key: a}", AZURE),
        ("{endpoint: 'http://a:1', service_account_key: a}", "gs://lake/shop"),
        ("{service_account: /a}", "gs://lake/shop"),
    ],
)
def test_what_a_store_knows_is_taken(tmp_path: Path, storage: str, root: str) -> None:
    assert read(tmp_path, in_a_store(storage, root)).lake.root == root


@pytest.mark.parametrize(
    ("written", "seconds"), [("500ms", 0.5), ("1.5h", 5400), ("2 m", 120), ("1d", 86400), ("3", 3), (".5s", 0.5)]
)
def test_durations_are_read_as_seconds(tmp_path: Path, written: str, seconds: float) -> None:
    text = HEAD + f"load: {{wait_for_old_transactions: {written}}}\ntables: [public.a]\n"
    assert read(tmp_path, text).load.wait_for_old_transactions == seconds


@pytest.mark.parametrize("written", ["-1s", "1w", "1H", "ten", "1s2", ".inf", "true", "null", "[1]", "1e400", "''"])
def test_other_durations_are_refused(tmp_path: Path, written: str) -> None:
    text = HEAD + f"load: {{wait_for_old_transactions: {written}}}\ntables: [public.a]\n"
    assert "load.wait_for_old_transactions: " in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1KiB", 1024),
        ("1kB", 1000),
        ("1.5GiB", 3 << 29),
        ("2 MB", 2 * 10**6),
        ("7", 7),
        ("8B", 8),
        ("4.1GB", 4_100_000_000),
        ("16.1kB", 16_100),
        ("0.3GiB", 322_122_547),
    ],
)
def test_sizes_are_read_as_bytes(tmp_path: Path, written: str, size: int) -> None:
    assert read(tmp_path, HEAD + f"replicate: {{memory: {written}}}\ntables: [public.a]\n").replicate.memory == size


@pytest.mark.parametrize("written", ["1TB", "1kb", "0", "-1", "0.5B", "1KB"])
def test_other_sizes_are_refused(tmp_path: Path, written: str) -> None:
    assert "replicate.memory: " in refused(tmp_path, HEAD + f"replicate: {{memory: {written}}}\ntables: [public.a]\n")


def test_a_name_comes_before_a_pattern_and_excluded_tables_are_nobodys(tmp_path: Path) -> None:
    pipeline = read(
        tmp_path,
        HEAD + "tables:\n  - {name: public.log_*, exclude: [public.log_old, public.log_tmp_*]}\n  - public.log_a\n",
    )
    a, b = pipeline.entry_for(TableName("public", "log_a")), pipeline.entry_for(TableName("public", "log_b"))
    assert a is pipeline.tables[1]
    assert b is pipeline.tables[0]
    assert b is not None
    assert isinstance(b.name, TablePattern)
    for name in ("log_old", "log_tmp_1", "other"):
        assert pipeline.entry_for(TableName("public", name)) is None


def test_the_freshness_of_a_table_is_its_own_else_the_default_else_none(tmp_path: Path) -> None:
    tables = "tables:\n  - {name: public.a, freshness: 5s}\n  - {name: public.log_*, freshness: 1m}\n  - public.b\n"
    names = [TableName("public", name) for name in ("a", "log_1", "b", "other")]
    pipeline = read(tmp_path, HEAD + "defaults: {freshness: 2h}\n" + tables)
    assert [pipeline.freshness_of(name) for name in names] == [5, 60, 7200, 7200]
    assert [read(tmp_path, HEAD + tables).freshness_of(name) for name in names] == [5, 60, None, None]
    assert "tables[0].freshness: expected a duration above zero" in refused(
        tmp_path, HEAD + "tables: [{name: public.a, freshness: 0}]\n"
    )


def test_pipeline_and_its_errors_cross_processes(tmp_path: Path) -> None:
    pipeline = read(tmp_path, HEAD + "tables: [public.a, public.log_*]\n")
    copy = pickle.loads(pickle.dumps(pipeline))
    assert copy == pipeline
    assert copy.file == pipeline.file
    with pytest.raises(BadPipelineFile) as error:
        read(tmp_path, "x: 1\n")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_an_airflow_connection_of_the_lake_is_for_a_store(tmp_path: Path) -> None:
    written = HEAD.replace("{root: file:///data/lake}", "{root: file:///data/lake, airflow: analytics}")
    assert "airflow names the connection of an object store" in refused(tmp_path, written + "tables: [public.a]\n")
    text = in_a_store("{}").replace("storage: {}", "airflow: 'no id'")
    assert "lake.airflow: expected the id of an Airflow connection" in refused(tmp_path, text)
