"""What the documentation site takes from elsewhere than docs/, its links, and the pages that are made from the code.

    python -m pip install -c constraints.txt -e '.[docs]'
    mkdocs build --strict                     # into site/; mkdocs serve shows it while you write
    python docs/mkdocs_hooks.py               # writes what is made from the code into docs/

Nothing is fetched from the network.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import posixpath
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pala
from metric_table import METRICS, Metric
from pala.config import Config, facts_of, load_preset, presets, to_table
from pala.config.facts import Facts
from pala.system.tables import flatten

_NO_UNIT = "\N{EN DASH}"
REPOSITORY = Path(__file__).resolve().parent.parent
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TABLES = {  # what docs/metrics.md shows where
    "every": lambda m: m.record == "every",
    "start": lambda m: m.record == "start",
    "episode": lambda m: m.record == "episode",
    "interval": lambda m: m.record == "interval" and m.is_of("a2c"),
    "gorila": lambda m: m.algorithms == ("gorila",),
}


# ---- pages made from the code ----------------------------------------------------------------------------------------


def configuration() -> str:
    """Return the page of all keys of a preset and of the command line: type, default, range, meaning."""
    sections = [
        "# All options",
        "Every key of a preset (TOML). On the command line a key is an option: `a2c.learning_rate` is "
        "`--a2c.learning-rate`. Names in brackets are sources, which stand at the end.",
        "A preset may have two more keys. `base` is another preset, by name or path, over whose settings it lies. "
        '`game` is an Atari game, such as `"SpaceInvaders"`, in place of `env.id`.',
        *_section(Config, Config(), ""),
        "## Sources\n\n" + str(inspect.getdoc(importlib.import_module("pala.config.schema"))).partition("Sources: ")[2],
    ]
    return _linked("\n\n".join(sections)) + "\n"


def _section(cls: Any, default: Any, prefix: str) -> Iterator[str]:
    hints, texts = typing.get_type_hints(cls), _texts(cls)
    inner = [field.name for field in dataclasses.fields(cls) if dataclasses.is_dataclass(hints[field.name])]
    rows = [
        (
            f"`{prefix}{name}`",
            _type(hints[name]),
            f"`{_toml(getattr(default, name))}`",
            _range(facts),
            f"{texts[name]}{_readers(facts)}",
        )
        for name, facts in facts_of(cls).items()
        if name in hints
    ]
    if prefix:
        yield f"## `[{prefix.rstrip('.')}]`\n\n{' '.join(str(inspect.getdoc(cls)).split())}"
    yield _table(("key", "type", "default", "range", "meaning"), rows)
    for name in inner:
        yield from _section(hints[name], getattr(default, name), f"{prefix}{name}.")


def _range(facts: Facts) -> str:
    """Return a setting's lowest and highest value in words; empty if it is no number."""
    return "" if facts.between is None else "{:g} to {:g}".format(*facts.between)


def _readers(facts: Facts) -> str:
    """Return sentences that say which runs read a setting, as far as its facts are no whole section's."""
    sentences = []
    if facts.kinds is not None:
        sentences.append(f"Read by `exchange.kind` {_either(facts.kinds)}.")
    sentences += [f"Not read if `{key}` is {_either(values)}." for key, values in facts.unless.items()]
    if facts.evaluation_may_differ:
        sentences.append("An evaluation may set it otherwise.")
    return "".join(f" {sentence}" for sentence in sentences)


def _either(values: Iterable[Any]) -> str:
    return " or ".join(f"`{_toml(value)}`" for value in values)


def _texts(cls: Any) -> dict[str, str]:
    """Return the string below each field of a dataclass, in one line."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(tree, ast.ClassDef)
    texts, last = {}, ""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            texts[last] = " ".join(str(node.value.value).split())
    return texts


def _type(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f'`"{value}"`' for value in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        return f"list of {inner[0].__name__}" if inner[-1] is Ellipsis else f"list of {len(inner)} {inner[0].__name__}s"
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(map(_type, typing.get_args(hint)))
    return getattr(hint, "__name__", str(hint))


def _toml(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def api() -> str:
    """Return the page of what `pala` exports: signatures and docstrings."""
    blocks = ["# Python API", "What `import pala` gives, from its docstrings. [python.md](python.md) shows it at work."]
    for name in pala.__all__:
        found = getattr(pala, name)
        blocks.append(f"## `pala.{name}`")
        blocks += _class(found) if isinstance(found, type) else [_signature(found), _doc(found)]
    return _linked("\n\n".join(blocks)) + "\n"


def _linked(text: str) -> str:
    """Return a text of the code with links in the place of names of pages."""
    return re.sub(r"(?<![/\w])docs/(\w+\.md)", r"[\1](\1)", text)


def _class(cls: type) -> Iterator[str]:
    """Yield a class, what it is made with, and what it has for others."""
    made_by = None if dataclasses.is_dataclass(cls) else vars(cls).get("__init__")
    if made_by is not None:
        signature = _signature(made_by).replace(") -> None", ")")
        yield re.sub(r"def __init__\((\s*)self,?\s*", rf"{cls.__name__}(\1", signature)
    yield _doc(cls)
    if made_by is not None and made_by.__doc__:
        yield _doc(made_by)
    if cls is Config:
        yield "Its fields: [options.md](options.md)."
    elif texts := _texts(cls):
        yield _table(("field", "meaning"), [(f"`{name}`", text) for name, text in texts.items()])
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function) and cls is not Config:
            yield f"### `{cls.__name__}.{name}`"
            as_value = re.sub(r"def (\w+)\(self\) -> ", r"\1: ", _signature(function))
            yield as_value if isinstance(member, property) else _signature(function)
            yield _doc(function)


def _signature(function: Any) -> str:
    """Return a function's signature as it stands in the code."""
    source = inspect.getsource(function)
    (node,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(node, ast.FunctionDef)
    lines = textwrap.dedent(source).splitlines()[node.lineno - 1 : node.body[0].lineno - 1]
    return "```\n" + "\n".join(lines).rstrip(":") + "\n```"


def _doc(found: Any) -> str:
    """Return a docstring, whose links lead from docs/."""
    return str(inspect.getdoc(found)).replace("](../docs/", "](")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *([_cell(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Escape a table's cell: a bar would end it, and `*` between words is no emphasis here."""
    return text.replace("|", "\\|")


# ---- the tables of docs/metrics.md -----------------------------------------------------------------------------------


def with_tables(page: str) -> str:
    """docs/metrics.md with its tables, between two comments each, made anew."""

    def made(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name}: docs/metric_table.py -->\n\n{_metrics_table(name)}\n\n<!-- end -->"

    return re.sub(r"<!-- (\w+): docs/metric_table.py -->.*?<!-- end -->", made, page, flags=re.DOTALL)


def _metrics_table(name: str) -> str:
    def row(m: Metric) -> tuple[str, ...]:
        return (f"`{m.name}`", m.unit or _NO_UNIT, *([m.role] if name == "gorila" else []), m.meaning)

    header = ("key", "unit", *(["role"] if name == "gorila" else []), "meaning")
    return _table(header, [row(m) for m in METRICS if TABLES[name](m)])


# ---- the table of docs/presets.md ------------------------------------------------------------------------------------


def with_presets(page: str) -> str:
    """docs/presets.md with its table of settings, between two comments, made anew."""
    made = f"<!-- settings: configs/ -->\n\n{_presets_table()}\n\n<!-- end -->"
    return re.sub(r"<!-- settings: configs/ -->.*?<!-- end -->", lambda _: made, page, flags=re.DOTALL)


def _presets_table() -> str:
    """Return what each preset, or the first of a family, sets otherwise than the defaults; a game is left out."""
    rows = []
    for file in sorted(presets.FOLDER.glob("*.toml")):
        games = presets.read(file).get("games", [])
        members = [name for name in presets.names(file.stem) or presets.names() if name.startswith(f"{file.stem}/")]
        name = members[0] if members else "pong" if games else file.stem
        settings, defaults = (flatten(to_table(config)) for config in (load_preset(name), Config()))
        others = [
            f"`{key} = {_toml(value)}`" for key, value in settings.items() if value != defaults[key] and key != "env.id"
        ]
        shown = f"{file.stem}/…" if members else "pong and five more" if games else file.stem
        rows.append((f"`{shown}`" if " " not in shown else shown, ", ".join(others) or "the defaults"))
    return _table(("presets", "settings that are not the defaults"), rows)


# ---- the repository's other pages, and links -------------------------------------------------------------------------


def place_on_site(path: str) -> str | None:
    """Where a file of the repository is on the site; None if it is not there."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/") and path.endswith((".md", ".svg")):
        return path.removeprefix("docs/")
    is_shown = path.startswith("results/") and path.endswith((".md", ".png"))
    return path if is_shown and (REPOSITORY / path).is_file() else None


def on_files(files: Any, config: Any) -> Any:
    """mkdocs: add the pages that lie outside docs/."""
    from mkdocs.structure.files import File

    results = sorted(p for p in (REPOSITORY / "results").rglob("*") if p.suffix in (".md", ".png"))
    for path in [*(REPOSITORY / name for name in MOVED), *results]:
        place = place_on_site(path.relative_to(REPOSITORY).as_posix())
        assert place is not None
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """mkdocs: lead links to where their targets are on the site."""
    return with_links(markdown, page.file.src_uri)


def with_links(markdown: str, uri: str) -> str:
    """Return a page's text with links that lead to the site's pages. A link to a file that the site lacks leaves its
    text."""
    origins = {place: path for path, place in MOVED.items()}
    origin = origins.get(uri, uri if uri.startswith("results/") else f"docs/{uri}")

    def led(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        place = place_on_site(posixpath.normpath(posixpath.join(posixpath.dirname(origin), target)))
        if place is None:
            return words.lstrip("!")[1:-1]
        return f"{words}({posixpath.relpath(place, posixpath.dirname(uri))}{anchor})"

    return re.sub(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)\s]*)?\)", led, markdown)


if __name__ == "__main__":
    docs = REPOSITORY / "docs"
    (docs / "options.md").write_text(configuration())
    (docs / "api.md").write_text(api())
    (docs / "metrics.md").write_text(with_tables((docs / "metrics.md").read_text()))
    (docs / "presets.md").write_text(with_presets((docs / "presets.md").read_text()))
