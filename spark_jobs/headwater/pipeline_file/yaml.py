"""A YAML file as plain values that remember where they stood, with `${VAR}` replaced from the environment.

For configuration: every fault is collected as a `FileProblem` with its path and line, none is raised alone. YAML 1.2's
plain scalars are read (`on`, `off`, `yes` and `no` are text), since `failover: on` must not become a truth value.
What came from the environment may be a secret: `Document.shown` gives it back as it was written in the file.
What the keys mean is left to `config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

Path = tuple[str | int, ...]
"""Keys and list indexes from the top of the file to a value."""

_VARIABLE = re.compile(r"\$(?:\$\{|\{([^}]*)(\}?))")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_MAX_VALUES = 100_000  # aliases of aliases can name more values than memory holds
_MAX_DEPTH = 50
_TOO_DEEP = f"nests more than {_MAX_DEPTH} levels deep"
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True)
class FileProblem:
    """One fault of a file: `path` as in `tables[1].key`, `line` counted from 1 where it is known."""

    path: str
    line: int | None
    message: str

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text} (line {self.line})" if self.line else text


@dataclass(slots=True)
class Document:
    """The values of a file. `unresolved` are the paths whose variable is missing."""

    data: Any = None
    lines: dict[Path, int] = field(default_factory=dict)
    as_written: dict[Path, str] = field(default_factory=dict)
    unresolved: set[Path] = field(default_factory=set)
    problems: list[FileProblem] = field(default_factory=list)

    def report(self, path: Path, message: str) -> None:
        self.problems.append(FileProblem(format_path(path), self.line(path), message))

    def line(self, path: Path) -> int | None:
        """The line of `path`, or of the nearest thing around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path) if path else None

    def value(self, path: Path) -> Any:
        """What stands at `path`; None when nothing does."""
        found = self.data
        for step in path:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return None
        return found

    def shown(self, path: Path) -> str:
        """The value at `path` for a message: short, and as written where a variable was replaced."""
        value = self.as_written.get(path, self.value(path))
        if isinstance(value, dict | list):
            return f"{'a' if value else 'an empty'} {'mapping' if isinstance(value, dict) else 'list'}"
        if value is None or isinstance(value, bool):
            return {None: "nothing", True: "true", False: "false"}[value]
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."


def format_path(path: Path) -> str:
    """`tables[1].key` for ("tables", 1, "key")."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def parse(content: bytes, environ: Mapping[str, str]) -> Document:
    """The document in `content`. When it is no YAML at all, `data` is None and the one problem says so."""
    document = Document()
    try:
        if deep := _too_deep(content):
            document.problems.append(deep)
            return document
        node = yaml.compose(content, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # Never str(error): it quotes the line, and the line may hold a password.
        problem = str(error.problem or error.context or "cannot be read")
        is_alias = "alias" in f"{problem} {error.context}" or "alphabetic or numeric" in problem
        hint = "; write a pattern that begins with * in quotes" if is_alias else ""
        document.problems.append(FileProblem("", mark.line + 1 if mark else None, f"not valid YAML: {problem}{hint}"))
        return document
    except (yaml.YAMLError, UnicodeError):
        document.problems.append(FileProblem("", None, "not valid YAML: it holds bytes that are no UTF-8 text"))
        return document
    if node is not None:
        document.data = _Reader(document, environ).value(node, (), ())
    return document


def _too_deep(content: bytes) -> FileProblem | None:
    """Where it nests deeper than anything that is meant. libyaml composes by recursion in C: enough levels end the
    process."""
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            mark = event.start_mark
            return FileProblem("", mark.line + 1 if mark else None, _TOO_DEEP)
    return None


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Only composes; the implicit types are those of YAML 1.2's core schema that configuration needs."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF"))
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"[-+]?[0-9]{1,18}\Z", re.ASCII), list("-+0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+)\Z", re.ASCII),
    list("-+.0123456789"),
)


class _Reader:
    """Turns composed nodes into values and fills the document's record of them."""

    def __init__(self, document: Document, environ: Mapping[str, str]) -> None:
        self._document = document
        self._environ = environ
        self._count = 0

    def value(self, node: yaml.Node, path: Path, around: tuple[int, ...]) -> Any:
        # A mapping's values have the line of their key: that is where a reader looks for them.
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        self._count += 1
        if self._count > _MAX_VALUES or id(node) in around:
            if self._count <= _MAX_VALUES + 1:
                self._document.report(path, "holds itself, or too many values, by YAML aliases")
            return None
        if len(around) > _MAX_DEPTH:  # by aliases
            self._document.report(path[:1], _TOO_DEEP)
            self._count = _MAX_VALUES + 1
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, (*around, id(node)))
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, i), (*around, id(node))) for i, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path, around: tuple[int, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == f"{_TAG}null":
                self._document.problems.append(FileProblem(format_path(path), line, "a key must be text"))
                continue
            key = str(key_node.value)  # a column may well be called 1 or true
            if key in values:
                first = self._document.lines[(*path, key)]
                self._document.problems.append(
                    FileProblem(format_path((*path, key)), line, f"the key is there twice, first in line {first}")
                )
                continue
            self._document.lines[(*path, key)] = line
            values[key] = self.value(value_node, (*path, key), around)
        return values

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        text = str(node.value)
        kind = node.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind in ("int", "float"):
                return int(text) if kind == "int" else float(text)
        except (KeyError, ValueError):
            kind = "?"
        if kind != "str":
            self._document.report(path, "has a YAML tag that is not understood here")
            return None
        return self._substitute(text, path)

    def _substitute(self, text: str, path: Path) -> str:
        """`text` with each `${NAME}` replaced; `$${` stands for `${` itself."""

        def replace(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return "${"
            self._document.as_written[path] = text
            if not match[2] or not _VARIABLE_NAME.match(name):
                problem = "a variable is written ${NAME}; a plain ${ is written $${"
            elif name not in self._environ:
                problem = f"the environment variable {name} is not set"
            else:
                return self._environ[name]
            self._document.unresolved.add(path)
            self._document.report(path, problem)
            return ""

        return _VARIABLE.sub(replace, text)
