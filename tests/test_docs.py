"""The pages are true where a machine can tell: links lead somewhere, paths exist, the README stays short.

Owns nothing of the wording. Examples in the README are executed by `tests/e2e/test_readme.py`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("distill/*.md")])
TOP = ("paceline", "engine", "autoscale", "deployments", "distill", "bench", "dashboards", "tests", "docs")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_of_the_source_tree_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in re.findall(rf"`((?:{'|'.join(TOP)})/[\w/.-]*)`", text):
        candidates = (ROOT / name, ROOT / f"{name}.py", ROOT / "tests" / f"{name}.py")
        assert any(path.exists() for path in candidates), f"{page.name} names {name}"


def test_panels_that_pages_name_exist() -> None:
    """Panels stand in italics after the word panel or panels."""
    rendered = "".join(path.read_text() for path in sorted((ROOT / "dashboards" / "rendered").glob("*.json")))
    titles = set(re.findall(r'"title": "([^"]*)"', rendered))
    for page in PAGES:
        for sentence in re.findall(r"panels? ((?:\*[^*]+\*(?: and |, )?)+)", page.read_text(encoding="utf-8")):
            for title in re.findall(r"\*([^*]+)\*", sentence):
                assert title in titles, f"{page.name} names the panel {title}"


def test_the_readme_is_short_and_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", readme))
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"api.md"}
    assert pages <= linked, pages - linked
