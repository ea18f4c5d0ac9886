"""The API reference, in build/docs/: every public name of fastpar with its signature and docstring, made by pdoc.

    make docs                                pages in build/docs/index.html
    python tools/make_docs.py --check        writes nothing; `make lint` runs it

Both fail, with the file and the line, on

* a public name, or a public method of one, without a docstring;
* a link in README.md, CONTRIBUTING.md, CHANGELOG.md or docs/ to a file, or a heading of one, that is not there;
* a name in these files (`fp.zero.shard`, `fastpar.comm.Communicator`) that does not exist.

With the pages written, a link in them to a page or a place that is not there fails, too.
"""

from __future__ import annotations

import argparse
import html.parser
import importlib
import inspect
import re
import shutil
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
sys.path.insert(0, str(ROOT))
import fastpar  # noqa: E402  (of this tree)

# The pages, in their order: packages whose `__all__` is public, and modules of which no package has the names.
MODULES = (
    "fastpar",
    *(f"fastpar.{name}" for name in fastpar._MODULES),
    *(f"fastpar.{name}" for name in ("mesh", "clip", "precision", "verification")),
    *(f"fastpar.integrations.{name}" for name in ("accelerate", "huggingface", "kernels", "torch_parallel", "trainer")),
)
PAPERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"`(?:fp|fastpar)((?:\.[A-Za-z_]\w*)+)")


# ---- public names ----------------------------------------------------------------------------------------------------


def public(module: types.ModuleType) -> dict[str, Any]:
    """Public names and what they are, looked up: they are lazy in most packages."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    return {name: getattr(module, name) for name in names if not name.startswith("_")}


def undocumented(module: types.ModuleType) -> Iterator[str]:
    """Public classes, functions and methods without a docstring, their own or inherited."""
    if not inspect.getdoc(module):
        yield f"{module.__name__} has no docstring"
    for name, value in public(module).items():
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if not inspect.getdoc(value):
            yield f"{module.__name__}.{name} has no docstring"
        if not inspect.isclass(value) or not value.__module__.startswith("fastpar"):
            continue
        for attribute, member in vars(value).items():
            if attribute.startswith("_") or not (inspect.isroutine(member) or isinstance(member, property)):
                continue
            if not any(inspect.getdoc(vars(base)[attribute]) for base in value.__mro__ if attribute in vars(base)):
                yield f"{module.__name__}.{name}.{attribute} has no docstring"


# ---- what is written by hand -----------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """As GitHub makes one of a heading's text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return {anchor(heading) for heading in re.findall(r"^#+ +(.+)$", prose, re.MULTILINE)}


def broken_link(source: Path, target: str) -> str:
    """What is wrong with a link of a page; empty: nothing, or it leads out of the project."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    path = (source.parent / unquote(parts.path)).resolve() if parts.path else source
    if not path.exists():
        return f"{target} does not exist"
    if parts.fragment and path.suffix == ".md" and parts.fragment not in anchors(path):
        return f"{target}: no such heading"
    return ""


def resolves(dotted: str) -> bool:
    """Whether fastpar.a.b is a module, or an attribute of what is before it."""
    value: Any = importlib.import_module("fastpar")
    for name in dotted.strip(".").split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            if not isinstance(value, types.ModuleType):
                return name in getattr(value, "__annotations__", {})
            try:
                value = importlib.import_module(f"{value.__name__}.{name}")
            except ImportError:
                return False
    return True


def problems_of(path: Path, *, with_names: bool) -> Iterator[str]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        where = f"{path.relative_to(ROOT)}:{number}"
        for found in LINK.finditer(line):
            if wrong := broken_link(path, found[1] or found[2]):
                yield f"{where}: link {wrong}"
        for found in NAME.finditer(line) if with_names else ():
            if not resolves(found[1]):
                yield f"{where}: there is no fastpar{found[1]}"


# ---- the pages -------------------------------------------------------------------------------------------------------


class _Page(html.parser.HTMLParser):
    """The links of a page, and the places in it that have a name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "a" and found.get("href"):
            self.links.append(str(found["href"]))
        if found.get("id"):
            self.places.add(str(found["id"]))


def broken_pages(folder: Path) -> Iterator[str]:
    pages = {path: _Page(path.read_text()) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target not in pages:
                yield f"{path.relative_to(folder)}: link to {link}, a page that is not there"
            elif parts.fragment and unquote(parts.fragment) not in pages[target].places:
                yield f"{path.relative_to(folder)}: link to {link}, a place that is not there"


def unlinked(page: str) -> str:
    """A page whose words in code have no link where pdoc knows the name but shows nothing of it (of a private base)."""
    places = _Page(page).places
    return re.sub(r'<a href="#([^"]+)">([\w.]+)</a>', lambda found: found[0] if found[1] in places else found[2], page)


def write(folder: Path) -> None:
    """A page for each of MODULES, an index of them, and what the search needs."""
    import pdoc

    pdoc.render.configure(docformat="google", footer_text="fastpar", show_source=False)
    pages = {name: pdoc.doc.Module(importlib.import_module(name)) for name in MODULES}
    shutil.rmtree(folder, ignore_errors=True)
    for name, page in pages.items():
        path = folder / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unlinked(pdoc.render.html_module(page, pages)))
    (folder / "index.html").write_text(pdoc.render.html_index(pages))
    (folder / "search.js").write_text(pdoc.render.search_index(pages))


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write no pages")
    flags = arguments.parse_args()
    warnings.simplefilter("error")  # pdoc warns of what it cannot find
    warnings.filterwarnings("default", module="torch")
    # Names that only type checkers import stay as they are written.
    warnings.filterwarnings("ignore", "Error parsing type annotation|Failed to run TYPE_CHECKING code")
    modules = [importlib.import_module(name) for name in MODULES]
    found = [line for module in modules for line in undocumented(module)]
    for path in [*PAPERS, *sorted((ROOT / "docs").rglob("*.md"))]:
        found += problems_of(path, with_names=path.name != "CHANGELOG.md")  # which tells of names that are gone
    if not flags.check:
        write(OUT)
        found += broken_pages(OUT)
        print(f"{len(list(OUT.rglob('*.html')))} pages in {OUT.relative_to(ROOT)}/index.html")
    print("\n".join(found) or "every public name is documented, every link leads somewhere")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
