"""Signatures and docstrings in the pages of the reference.

Two comments mark a part of a page; the text between them is generated from the code:

    <!-- api: class wsam.SharpnessAware: step, begin -->
    <!-- end -->

The words are a directive of autodoc without "auto", a name, and the members to show: a list, or "*" for
all. On the built site that directive replaces the text. The page api.md has a table of all names:

    <!-- names: api/geometry.md -->
    <!-- end -->

    python docs/api_page.py         # writes all pages again
"""

import ast
import importlib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wsam.lab.markdown_tables import fill_tables, find_markers, update_tables

DOCS = Path(__file__).parent
INDEX = DOCS / "api.md"
MARK = "api:"
NAMES = "names:"
PAGES = [
    page
    for page in sorted([*DOCS.glob("api/*.md"), *DOCS.glob("methods/*.md")])
    if find_markers(page.read_text(), MARK)
]
WIDTH = 100


def for_site(text: str) -> str:
    """Return a page with autodoc's directives in place of the generated text."""
    text = fill_tables(text, NAMES, lambda words: names_table(words, "{{py:obj}}`~{full}`"))
    return fill_tables(text, MARK, directive)


def directive(words: str) -> str:
    kind, name, members = parse(words)
    options = "" if members is None else f"\n   :members: {', '.join(members)}".rstrip()
    options += "\n   :no-value:" if kind == "data" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}{options}\n```"


def parse(words: str) -> tuple[str, str, list[str] | None]:
    """Return the kind, the name, and the members: a list, empty for all, None for none."""
    target, _, listed = words.partition(": ")
    kind, name = target.split()
    members = [member.strip() for member in listed.split(",") if member.strip() != "*"]
    return kind, name, members if listed else None


# The table of names -----------------------------------------------------------------------------


def names_table(words: str, link: str = "[`{short}`]({page})") -> str:
    """Return a table of the names of some pages, with the first line of their docstrings."""
    rows = ["| name | |", "|---|---|"]
    for page in sorted(DOCS.glob(words)):
        for marked in find_markers(page.read_text(), MARK):
            for full, value in named(marked):
                where = page.relative_to(DOCS).as_posix()
                shown = link.format(full=full, short=full.rsplit(".", 1)[1], page=where)
                rows.append(f"| {shown} | {summary(full, value)} |")
    return "\n".join(rows)


def named(words: str) -> Iterator[tuple[str, Any]]:
    """Yield the full names that a mark documents, with their values."""
    kind, name, members = parse(words)
    if kind != "module":
        parent, _, last = name.rpartition(".")
        yield name, getattr(importlib.import_module(parent), last)
        return
    module = importlib.import_module(name)
    for one in members or getattr(module, "__all__", None) or defined_in(module):
        yield f"{name}.{one}", getattr(module, one)


def summary(full: str, value: Any) -> str:
    """Return the first sentence of a docstring."""
    module, _, last = full.rpartition(".")
    doc = own_doc(value) if callable(value) else doc_of_data(importlib.import_module(module), last)
    first = " ".join(doc.split("\n\n")[0].split())
    return re.sub(r"``?([^`]+)``?", r"`\1`", first).replace("|", "\\|")


# Markdown ---------------------------------------------------------------------------------------


def markdown(words: str) -> str:
    """Return the signature and docstring of an object and its members."""
    kind, name, members = parse(words)
    if kind == "module":
        module = importlib.import_module(name)
        names = members or getattr(module, "__all__", None) or defined_in(module)
        parts = [as_markdown(inspect.getdoc(module) or "")] if not members else []
        for one in names:
            parts += [f"### `{one}`", describe(module, one, f"{name}.{one}", [])]
        return "\n\n".join(parts)
    module_name, _, last = name.rpartition(".")
    module = importlib.import_module(module_name)
    return describe(module, last, name, members)


def defined_in(module: Any) -> list[str]:
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__]
    return [n for n in own if not n.startswith("_") and inspect.getdoc(getattr(module, n))]


def describe(module: Any, last: str, name: str, members: list[str] | None) -> str:
    value = getattr(module, last)
    if not callable(value):
        return f"```py\n{name}\n```\n\n{doc_of_data(module, last)}".strip()
    prefix = "class " if inspect.isclass(value) else ""
    parts = [f"```py\n{prefix}{name}{signature(value)}\n```", as_markdown(own_doc(value))]
    for member, found in members_of(value, members):
        is_property = isinstance(found, property)
        shown = "  # property" if is_property else signature(found)
        parts += [f"```py\n{last}.{member}{shown}\n```", as_markdown(own_doc(found))]
    return "\n\n".join(part for part in parts if part)


def members_of(value: Any, members: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Yield public methods and properties that have a docstring, in the order of the source."""
    if not inspect.isclass(value) or members is None:
        return
    for name in members or [name for name in vars(value) if not name.startswith("_")]:
        found = getattr(value, name)
        if (callable(found) or isinstance(found, property)) and inspect.getdoc(found):
            yield name, found


def own_doc(value: Any) -> str:
    """Return the docstring without that of a parent, or the one that dataclasses generate."""
    doc = inspect.cleandoc(value.__doc__ or "")
    return "" if doc.startswith(f"{getattr(value, '__name__', '')}(") else doc


def signature(value: Any) -> str:
    """Return the signature with short names of types, on several lines if it is long."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return ""
    found = inspect.signature(value)
    parameters = [p for p in found.parameters.values() if p.name != "self"]
    shown, kinds = [parameter(p) for p in parameters], [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = "" if inspect.isclass(value) else annotation(found.return_annotation, " -> ")
    line = f"({', '.join(shown)}){returned}"
    lines = "".join(f"    {one},\n" for one in shown)
    return line if len(line) < WIDTH - 30 else f"(\n{lines}){returned}"


def parameter(p: inspect.Parameter) -> str:
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    kind = annotation(p.annotation, ": ")
    default = p.default.__name__ if inspect.isclass(p.default) else repr(p.default)
    default = "..." if "<" in default else default  # a function, or made for each call
    end = "" if p.default is p.empty else (" = " if kind else "=") + default.replace("'", '"')
    return f"{stars}{p.name}{kind}{end}"


def annotation(kind: Any, prefix: str) -> str:
    """Return an annotation without the names of modules."""
    if kind is inspect.Parameter.empty:
        return ""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return prefix + re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text).replace("'", '"')


def doc_of_data(module: Any, name: str) -> str:
    """Return the string below an assignment."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, following in itertools.pairwise(body):
        targets = [getattr(statement, "target", None), *getattr(statement, "targets", [])]
        if name in [getattr(target, "id", None) for target in targets]:
            return as_markdown(ast.literal_eval(following.value))  # type: ignore[attr-defined]
    return ""


SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")


def as_markdown(doc: str) -> str:
    """Return a docstring in Google's style as Markdown."""
    done, lines = [], doc.splitlines()
    while lines:
        line = lines.pop(0)
        section = SECTION.match(line)
        if section is None:
            done.append(line)
            continue
        block = []
        while lines and (not lines[0] or lines[0].startswith(" ")):
            block.append(lines.pop(0))
        text = textwrap.dedent("\n".join(block)).strip("\n")
        if section[1].startswith("Example"):
            text = f"```py\n{text}\n```"
        elif section[1] in {"Args", "Attributes", "Raises"}:
            text = re.sub(r"^(\S[^:]*):", r"- `\1`:", text, flags=re.MULTILINE)
            text = re.sub(r"^    ", "  ", text, flags=re.MULTILINE)
        done += [f"{line}\n\n{text}", ""]
    return "\n".join(done).strip()


if __name__ == "__main__":
    for page in PAGES:
        update_tables(page, MARK, markdown)
    update_tables(INDEX, NAMES, names_table)
