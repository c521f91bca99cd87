"""The values of the pipeline file: from what a person writes to what the program uses.

One function per kind of value, each raising ValueError with what was expected. The messages never repeat the value:
it may have come from the environment, and a connection string is a secret wherever it comes from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from pydantic import SecretStr

from headwater.lake_root import place_of, refuse_misread
from headwater.names import BadName, TableName, TablePattern, parse_identifier, parse_name_or_pattern
from headwater.pipeline_file.quantities import parse_duration, parse_size

LIBPQ_SECRETS: Final = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
"""Options of a connection string that no text may show."""

_LEAST_CEILING: Final = 1 << 20
_T = TypeVar("_T")
_PIPELINE_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}\Z")
_AIRFLOW = re.compile(r"\s*airflow:\s*(\S*)\s*\Z")
_HASH_KEY = re.compile(r"\s*env:([A-Za-z_][A-Za-z0-9_]*)\s*\Z")
_CONNECTION_ID = re.compile(r"[A-Za-z0-9_.-]{1,250}\Z")
_DECIMAL = re.compile(r"decimal\(\s*([0-9]{1,2})\s*(?:,\s*([0-9]{1,2})\s*)?\)\Z", re.ASCII)
_PLAIN_TYPES = (  # of Spark SQL
    *("string", "boolean", "smallint", "int", "bigint", "float", "double"),
    *("date", "timestamp", "timestamp_ntz", "binary"),
)
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[A-Za-z0-9/_-]*)?\Z")
_MAX_PIPELINE_NAME = 45  # `headwater_<pipeline>_inserts`, the name of a publication, must fit into 63 bytes


def text_value(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text" + (", in quotes" if isinstance(value, int | float) else ""))
    return value


def row_filter(value: Any) -> str:
    text = text_value(value).strip()
    if not text or ";" in text or "--" in text or "/*" in text:
        raise ValueError("expected one SQL condition, without a semicolon and comments")
    return text


def name_value(value: Any) -> str:
    return _reasoned(parse_identifier, value)


def table_value(value: Any) -> TableName | TablePattern:
    return _reasoned(parse_name_or_pattern, value)


def _reasoned(parse: Callable[[str], _T], value: Any) -> _T:
    try:
        return parse(text_value(value))
    except BadName as error:
        # Only the reason: the text may have come from the environment.
        raise ValueError(error.reason) from None


def _matching(pattern: re.Pattern[str], form: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if not pattern.match(text_value(value)):
            raise ValueError(f"expected {form}")
        return str(value)

    return check


def pipeline_name(value: Any) -> str:
    name = _matching(_PIPELINE_NAME, "a name of a-z, 0-9 and _ that begins with a letter")(value)
    if len(name) > _MAX_PIPELINE_NAME:
        raise ValueError(f"expected at most {_MAX_PIPELINE_NAME} characters")
    return name


def duration_value(value: Any) -> float:
    return parse_duration(value)


def slot_name(value: Any) -> str:
    return _matching(_SLOT_NAME, "1 to 63 of a-z, 0-9 and _")(value)


def positive_duration(value: Any) -> float:
    seconds = parse_duration(value)
    if seconds <= 0:
        raise ValueError("expected a duration above zero")
    return seconds


def positive_size(value: Any) -> int:
    size = parse_size(value)
    if size <= 0:
        raise ValueError("expected a size above zero")
    return size


def ceiling_size(value: Any) -> int:
    """Past it the slot is given up, and at rest a source keeps some log: 20 that was meant as GB would end all."""
    size = positive_size(value)
    if size < _LEAST_CEILING:
        raise ValueError("expected at least 1MiB; a bare number is bytes, so write the unit, for example 20GiB")
    return size


def positive_count(value: Any) -> int:
    # Text too: a number may come from the environment. Not bool, which is an int in Python.
    if isinstance(value, bool) or not re.fullmatch(r"[0-9]{1,15}", str(value), re.ASCII) or int(value) == 0:
        raise ValueError("expected a whole number, at least 1")
    return int(value)


def count_or_auto(value: Any) -> int | str:
    try:
        return "auto" if value == "auto" else positive_count(value)
    except ValueError:
        raise ValueError("expected auto, or a whole number, at least 1") from None


def truth_value(value: Any) -> bool:
    if value not in (True, False, "true", "false"):
        raise ValueError("expected true or false")
    return value in (True, "true")


def airflow_id(text: str) -> str | None:
    """The id in `airflow:<id>`; None when `text` is something else."""
    match = _AIRFLOW.match(text)
    return match[1] if match else None


def connection_id(value: Any) -> str:
    """The id of an Airflow connection."""
    return _matching(_CONNECTION_ID, "the id of an Airflow connection (letters, digits, _ . -)")(value)


def connection_value(value: Any) -> SecretStr:
    """A libpq connection string, or `airflow:<conn_id>`, also as a mapping. Its errors never show the value."""
    if isinstance(value, Mapping):
        if list(value) != ["airflow"] or not isinstance(value["airflow"], str):
            raise ValueError("expected a libpq URI, a key=value string, or a mapping with the one key airflow")
        value = f"airflow:{value['airflow']}"
    text = text_value(value)
    conn_id = airflow_id(text)
    if conn_id is not None:
        if not _CONNECTION_ID.match(conn_id):
            raise ValueError("expected airflow: and the id of an Airflow connection (letters, digits, _ . -)")
        return SecretStr(f"airflow:{conn_id}")
    if not text.strip():
        raise ValueError("is empty; expected a libpq URI such as postgresql://user@host:5432/database")
    if not is_conninfo(text):
        raise ValueError(
            "neither a libpq URI (postgresql://user:password@host:port/database, special characters percent-encoded) "
            "nor a key=value string (host=... dbname=...); the value is secret and not shown"
        )
    return SecretStr(text)


def hash_key_value(value: Any) -> str:
    """The environment variable in `env:NAME`. The key itself is refused, and not shown."""
    match = _HASH_KEY.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected env: and the name of the environment variable that holds the key; not shown")
    return match[1]


def mask_value(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError('expected the text that stands in place of each value, in quotes: "***"')
    return value


def root_value(value: Any) -> str:
    place_of(text_value(value))
    refuse_misread(value)
    return str(value)


def endpoint_value(value: Any) -> str:
    if not _ENDPOINT.match(text_value(value)):
        raise ValueError("expected http:// or https://, a host, and a port if need be: no user, no query")
    return str(value).rstrip("/")


def secret_value(value: Any) -> SecretStr:
    """Its errors never show the value."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected text, as ${VARIABLE} of the environment; not shown")
    return SecretStr(value)


def at_least_one(tables: Any) -> Any:
    # Not pydantic's min_length: it does not count entries with a fault, and so would report a second one.
    if tables == []:
        raise ValueError("expected at least one table")
    return tables


def distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        raise ValueError("expected at least one column")
    if len(set(names)) != len(names):
        raise ValueError("names a column twice")
    return names


def lake_type(value: Any) -> str:
    """A type of the lake, without blanks. Whether the column can become one is for the type table to say."""
    text = text_value(value).strip().lower()
    if array := re.fullmatch(r"array<(.*)>", text):
        return f"array<{lake_type(array[1])}>"
    if text in _PLAIN_TYPES:
        return text
    decimal = _DECIMAL.match(text)
    precision, scale = (int(decimal[1]), int(decimal[2] or 0)) if decimal else (0, 0)
    if not 1 <= precision <= 38 or scale > precision:
        raise ValueError(
            f'unknown type; expected one of {", ".join(_PLAIN_TYPES)}, "decimal(p,s)" in quotes with p up to 38 '
            "and s up to p, or array<...> of these"
        )
    return f"decimal({precision},{scale})"


def bad_value(value: Any) -> str:
    # A plain null of YAML is what a person writes for the choice "null".
    if value is None:
        return "null"
    if value not in ("suspend", "null", "string"):
        raise ValueError("expected one of: suspend, null, string")
    return str(value)


def is_conninfo(text: str) -> bool:
    """Whether libpq understands `text` as a connection string."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        conninfo_to_dict(text)
    except (ProgrammingError, UnicodeError, ValueError):
        # Dropped on purpose: libpq's message quotes the part it stumbled over, often the password.
        return False
    return True


CONNECTION_SOCKET = "HEADWATER_CONNECTION_SOCKET"
"""The environment variable with the path of the socket at which an operator hands it over anew."""


def connection_variable(conn_id: str) -> str:
    """The environment variable in which an operator hands over the libpq string of an Airflow connection."""
    return "HEADWATER_CONNECTION_" + re.sub(r"[^A-Z0-9]", "_", conn_id.upper())
