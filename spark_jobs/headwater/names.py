"""Names of tables and columns, as SQL writes them.

Unquoted text is folded to lower case; quotes keep case, dots and spaces, and a doubled quote inside them stands
for one (PostgreSQL documentation, "Identifiers and Key Words"). Output is always `schema.table`, each part as
PostgreSQL's own `quote_ident` writes it, so that printed names can be pasted into SQL and parsed again.
This module knows no catalog: whether a table exists is for `source` to say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

INSERTS_SUFFIX = "_inserts"
"""What the name of the publication for insert-only tables ends in."""
MAX_NAME_BYTES = 63
"""NAMEDATALEN - 1. PostgreSQL cuts a longer name off with a notice; here it is refused: it can match nothing."""

# Every keyword of PostgreSQL 18 whose category is not "unreserved" (select word from pg_get_keywords() where
# catcode <> 'U'); it contains the list of 15. Fixed here, so that a table is printed alike whatever the server.
_KEYWORD_LIST = (
    "all analyse analyze and any array as asc asymmetric authorization between bigint binary bit boolean both case "
    "cast char character check coalesce collate collation column concurrently constraint create cross "
    "current_catalog current_date current_role current_schema current_time current_timestamp current_user dec "
    "decimal default deferrable desc distinct do else end except exists extract false fetch float for foreign "
    "freeze from full grant greatest group grouping having ilike in initially inner inout int integer intersect "
    "interval into is isnull join json json_array json_arrayagg json_exists json_object json_objectagg json_query "
    "json_scalar json_serialize json_table json_value lateral leading least left like limit localtime "
    "localtimestamp merge_action national natural nchar none normalize not notnull null nullif numeric offset on "
    "only or order out outer overlaps overlay placing position precision primary real references returning right "
    "row select session_user setof similar smallint some substring symmetric system_user table tablesample then "
    "time timestamp to trailing treat trim true union unique user using values varchar variadic verbose when where "
    "window with xmlattributes xmlconcat xmlelement xmlexists xmlforest xmlnamespaces xmlparse xmlpi xmlroot "
    "xmlserialize xmltable "
)
_QUOTED_KEYWORDS = frozenset(_KEYWORD_LIST.split())
# quote_ident also quotes `$`, which an identifier may hold unquoted: what PostgreSQL prints is what counts.
_SAFE = re.compile(r"[a-z_][a-z0-9_]*\Z")
_QUOTED_PART = re.compile(r'"((?:[^"\0]|"")+)"')
# Bytes above 7F are letters to PostgreSQL. Written as what is left out: those ranges take re 20 ms to compile.
_NO_LETTER = r"\x00-@\[-\^`{-\x7f"
_NO_IDENT = r"\x00-#%-/:-@\[-\^`{-\x7f"
_BARE_PART = re.compile(f"[^{_NO_LETTER}][^{_NO_IDENT}]*")
_WILD_PART = re.compile(f"(?:\\*|[^{_NO_LETTER}])(?:\\*|[^{_NO_IDENT}])*")
_ASCII_UPPER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")
_PLAIN_PATH_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


class BadName(ValueError):
    """Text that is no name. `reason` does not repeat the text, which may have come from the environment."""

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, reason)
        self.text = text
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.text!r}: {self.reason}"


def quote_ident(name: str) -> str:
    """`name` as PostgreSQL's function quote_ident writes it."""
    if _SAFE.match(name) and name not in _QUOTED_KEYWORDS:
        return name
    return '"' + name.replace('"', '""') + '"'


def yaml_key(name: str) -> str:
    """Column `name` as a key of the pipeline file: it is read as SQL, so YAML must keep the double quotes."""
    quoted = quote_ident(name)
    return quoted if quoted == name else "'" + quoted.replace("'", "''") + "'"


def path_part(name: str) -> str:
    """`name` as one folder name: each byte of its UTF-8 outside [A-Za-z0-9_-] becomes `~XX`."""
    return "".join(chr(byte) if byte in _PLAIN_PATH_BYTES else f"~{byte:02X}" for byte in name.encode())


def parse_identifier(text: str) -> str:
    """The one name (of a column, a publication) that `text` writes; BadName otherwise."""
    parts = _split(text, wildcards=False)
    if len(parts) != 1:
        raise BadName(text, "expected one name without dots; write a name that holds a dot in double quotes")
    return parts[0][0]


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table of the source. Both parts are the true names, neither folded nor quoted."""

    schema: str
    name: str

    @classmethod
    def parse(cls, text: str, default_schema: str | None = None) -> TableName:
        """The table that `text` names; without `default_schema` the schema must be written. BadName otherwise."""
        (schema, _), (name, _) = _schema_and_name(text, _split(text, wildcards=False), default_schema)
        return cls(schema, name)

    @property
    def path(self) -> str:
        """Where the table lies below the lake's root."""
        return f"{path_part(self.schema)}/{path_part(self.name)}"

    def __str__(self) -> str:
        return f"{quote_ident(self.schema)}.{quote_ident(self.name)}"


@dataclass(frozen=True, slots=True, order=True)
class TablePattern:
    """Tables by name: `*` stands for any text in a part that is a wildcard, and for itself in one that is not."""

    schema: str
    name: str
    schema_is_wild: bool
    name_is_wild: bool

    @classmethod
    def parse(cls, text: str) -> TablePattern:
        """The pattern that `text` writes, `*` unquoted in at least one part; BadName otherwise."""
        (schema, schema_is_wild), (name, name_is_wild) = _schema_and_name(text, _split(text, wildcards=True), None)
        if not (schema_is_wild or name_is_wild):
            raise BadName(text, "expected a pattern: a name with an unquoted *")
        return cls(schema, name, schema_is_wild, name_is_wild)

    def matches(self, table: TableName) -> bool:
        """Whether `table` is meant. A wildcard schema never reaches into the system's own schemas."""
        if self.schema_is_wild and (table.schema.startswith("pg_") or table.schema == "information_schema"):
            return False
        return _part_matches(self.schema, self.schema_is_wild, table.schema) and _part_matches(
            self.name, self.name_is_wild, table.name
        )

    def __str__(self) -> str:
        schema = self.schema if self.schema_is_wild else quote_ident(self.schema)
        return f"{schema}.{self.name if self.name_is_wild else quote_ident(self.name)}"


def parse_name_or_pattern(text: str) -> TableName | TablePattern:
    """What an entry of the pipeline file names: a pattern if it holds an unquoted `*`, else one table."""
    if any(is_wild for _, is_wild in _split(text, wildcards=True)):
        return TablePattern.parse(text)
    return TableName.parse(text)


def _part_matches(part: str, is_wild: bool, name: str) -> bool:
    return _glob(part).fullmatch(name) is not None if is_wild else part == name


@lru_cache(maxsize=1024)
def _glob(part: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, part.split("*"))), re.DOTALL)


def _schema_and_name(
    text: str, parts: list[tuple[str, bool]], default_schema: str | None
) -> tuple[tuple[str, bool], tuple[str, bool]]:
    if len(parts) == 1 and default_schema is not None:
        return (default_schema, False), parts[0]
    if len(parts) == 1:
        raise BadName(text, "the schema is missing: write schema.table, for example public.orders")
    if len(parts) != 2:
        raise BadName(text, "expected schema.table; write a name that holds a dot in double quotes")
    return parts[0], parts[1]


def _split(text: str, *, wildcards: bool) -> list[tuple[str, bool]]:
    """The parts of a dotted name, each with whether it is a wildcard. White space around a dot is SQL's."""
    parts: list[tuple[str, bool]] = []
    bare = _WILD_PART if wildcards else _BARE_PART
    rest = text.strip()
    while True:
        if quoted := _QUOTED_PART.match(rest):
            part, is_wild, end = quoted[1].replace('""', '"'), False, quoted.end()
        elif plain := bare.match(rest):
            part, is_wild, end = plain[0].translate(_ASCII_UPPER), "*" in plain[0], plain.end()
        else:
            raise BadName(text, _what_is_wrong(rest))
        if len(part.encode()) > MAX_NAME_BYTES:
            raise BadName(text, f"longer than the {MAX_NAME_BYTES} bytes that a PostgreSQL name may have")
        parts.append((part, is_wild))
        after, rest = rest[end:], rest[end:].lstrip()
        if not rest:
            return parts
        if not rest.startswith("."):
            raise BadName(text, _what_is_wrong(after))
        rest = rest[1:].lstrip()


def _what_is_wrong(rest: str) -> str:
    if not rest:
        return "a name is missing"
    if rest.startswith('""'):
        return "a name in quotes must not be empty"
    if rest.startswith('"'):
        return "a double quote is not closed, or stands in the middle of a name"
    if rest.startswith("*"):
        return "a * is not possible here; patterns stand only in the pipeline file, unquoted"
    character = "a blank" if rest[0].isspace() else f"the character {rest[0]!r}"
    return f"{character} needs double quotes around the name (in YAML: '\"Order Lines\"')"
