"""What the site holds beside the pages of this folder, made when it is built so that it cannot go stale (`make docs`).

The files of the repository's root that readers want, the list of decisions, every option of the command line, and the
schema of the pipeline file, whose descriptions are those of the reference. Other than that it only turns links, which
are written for a reader of the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater import demo
from headwater.cli import arguments
from headwater.pipeline_file.pipeline import Pipeline

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FROM_THE_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "reporting.md": "SECURITY.md",
}
_SITE = {source: f"docs/{page}" for page, source in FROM_THE_ROOT.items()} | {
    "docs/decisions": "docs/decisions/index.md"
}
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_KEY = re.compile(r"^\| `([\w.\[\]]+)` \| .*? \| .*? \| (.*) \|$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is not in the folder."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in FROM_THE_ROOT.items()}
    made["decisions/index.md"] = decisions()
    made["reference/command-line.md"] = command_line()
    made["reference/schema.md"] = schema_page()
    made["reference/pipeline.schema.json"] = json.dumps(schema(), indent=2, ensure_ascii=False)
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links between the pages of the site."""
    path = page.file.src_uri
    return _LINK.sub(lambda link: f"]({_turned(link[1], path)})", markdown)


def _turned(target: str, page: str) -> str:
    file, mark, anchor = target.partition("#")
    if not file or re.match(r"[a-z]+:", target):
        return target
    home = os.path.dirname(FROM_THE_ROOT.get(page, f"docs/{page}"))
    found = os.path.normpath(os.path.join(home, file))
    return os.path.relpath(_SITE.get(found, found), os.path.dirname(f"docs/{page}")) + mark + anchor


def decisions() -> str:
    """The list of decisions, by their titles."""
    titles = [(path.name, path.read_text(encoding="utf-8").splitlines()[0]) for path in DOCS.glob("decisions/0*.md")]
    lines = [f"- [{title.removeprefix('# ')}]({name})" for name, title in sorted(titles)]
    return "\n".join(["# Decisions", "", "What somebody could ask about, and why it is as it is.", "", *lines, ""])


def command_line() -> str:
    """Every command with its options, as its `--help` says."""
    os.environ["COLUMNS"] = "88"  # the width that argparse writes for
    parser = arguments.parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {name: command.format_help() for name, command in commands.choices.items()}
    helps["demo"] = demo.parser().format_help()
    page = [
        "# Every option",
        "",
        "As `headwater COMMAND --help` prints it. What the commands do is in [commands](commands.md).",
        "",
    ]
    for name, text in {"headwater": parser.format_help(), **helps}.items():
        page += [f"## {name}", "", "```text", text.rstrip(), "```", ""]
    return "\n".join(page)


def schema() -> dict[str, Any]:
    """JSON Schema of the pipeline file, for editors; the meaning of each key is the one that the reference gives."""
    made = Pipeline.model_json_schema()
    meanings = dict(_KEY.findall((DOCS / "reference" / "pipeline-file.md").read_text(encoding="utf-8")))
    parts = {
        "": made,
        **{key: made["$defs"][_part(value)] for key, value in made["properties"].items() if _part(value)},
    }
    made["properties"]["tables"]["items"] = {"anyOf": [{"type": "string"}, made["properties"]["tables"]["items"]]}
    entry = made["$defs"]["TableEntry"]
    for section, part in [*parts.items(), ("tables[]", entry)]:
        part.pop("description", None)
        for key, value in part["properties"].items():
            value.pop("title", None)
            if meaning := meanings.get(f"{section}.{key}".lstrip("."), meanings.get(f"defaults.{key}")):
                value["description"] = _LINK.sub("]", meaning).replace("[", "").replace("]", "")
    return made


def _part(value: dict[str, Any]) -> str:
    return str(value.get("$ref", "")).rpartition("/")[2]


def schema_page() -> str:
    """The schema, to be looked at and to be given to an editor."""
    return f"""# Schema of the pipeline file

[pipeline.schema.json](pipeline.schema.json) is made from the code that reads the file. An editor with a YAML
language server completes and explains the keys of a file that begins with `# yaml-language-server: $schema=` and
the address or path of the schema. It knows the form of each key; what depends on others (names that are listed
twice, keys beside a pattern) `headwater check` tells. The same as a table is the [pipeline file](pipeline-file.md).

```json
{json.dumps(schema(), indent=2, ensure_ascii=False)}
```
"""
