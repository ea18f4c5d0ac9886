"""What `make docs` refuses: broken links, names that do not exist, public names without a docstring."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).resolve().parents[2]


docs = programs.load("tools/make_docs.py")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[a](b.md)", ""),
        ("[a](b.md#the-heading-of-b)", ""),
        ("![a](b.md) and [out](https://example.org/x#y)", ""),
        ("[a](#here)", ""),
        ("[a](missing.md)", "missing.md does not exist"),
        ("![a](missing.svg)", "missing.svg does not exist"),
        ("[a](b.md#elsewhere)", "b.md#elsewhere: no such heading"),
        ("[a](#elsewhere)", "#elsewhere: no such heading"),
        ("`fp.ops.rms_norm(x)`, `fastpar.comm.Communicator.all_reduce`, `fp.pipeline.runtime`", ""),
        ("`fp.ops.rms_normal`", "there is no fastpar.ops.rms_normal"),
        ("`fp.zero.Zero.detatch()`", "there is no fastpar.zero.Zero.detatch"),
    ],
)
def test_links_and_names_of_a_page_lead_somewhere(
    line: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    (tmp_path / "b.md").write_text("# The *heading* of `b`\n\n```\n# elsewhere\n```\n")
    page = tmp_path / "a.md"
    page.write_text(f"# Here\n\n{line}\n")
    found = list(docs.problems_of(page, with_names=True))
    assert [text.removeprefix("a.md:3: ").removeprefix("link ") for text in found] == ([complaint] if complaint else [])


def test_public_names_and_methods_need_docstrings() -> None:
    class Documented:
        """Is."""

        def method(self) -> None:
            """Is."""

        def bare(self) -> None: ...

        @property
        def value(self) -> int:
            return 1

        def _private(self) -> None: ...

    class Heir(Documented):
        """Inherits the docstring of `method`."""

        def method(self) -> None: ...

    def function() -> None: ...

    Documented.__module__ = Heir.__module__ = "fastpar.example"
    module = types.ModuleType("fastpar.example", "An example.")
    vars(module).update(Documented=Documented, Heir=Heir, function=function, LIMIT=3)
    module.__all__ = ["Documented", "Heir", "function", "LIMIT"]
    found = [line.removeprefix("fastpar.example.").partition(" ")[0] for line in docs.undocumented(module)]
    assert found == ["Documented.bare", "Documented.value", "function"]


def test_a_link_between_pages_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">b</a> <a href="#x">here</a></p>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#z">z</a> <a href="c.html">c</a></p>')
    found = sorted(docs.broken_pages(tmp_path))
    assert found == [
        "b.html: link to a.html#z, a place that is not there",
        "b.html: link to c.html, a page that is not there",
    ]


def test_every_public_package_has_a_page() -> None:
    import fastpar

    assert {f"fastpar.{name}" for name in fastpar._MODULES} <= set(docs.MODULES)


def test_the_figures_are_what_their_scripts_draw() -> None:
    flow = programs.load("docs/draw_data_flow.py")
    for name in ("linear", "moe", "zero3"):
        assert (ROOT / "docs" / "internals" / f"flow_{name}.svg").read_text() == getattr(flow, name)()
    assert (ROOT / "docs" / "layers.svg").read_text() == programs.load("docs/draw_layers.py").draw()
