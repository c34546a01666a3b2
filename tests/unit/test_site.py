"""The navigation of the site that `make docs` builds, without mkdocs: it is whole, and all links lead somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_source", ROOT / "tools" / "site.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once_and_every_entry_is_there(site: ModuleType) -> None:
    listed = list(site.pages(site.expanded(site.settings()["nav"])))
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(there - set(listed)) == []
    assert [page for page in listed if not (ROOT / page).is_file()] == []
    assert len(listed) == len(set(listed))


def test_what_pages_of_the_site_lead_to_is_there(site: ModuleType) -> None:
    missing = []
    for page in site.pages(site.expanded(site.settings()["nav"])):
        text = (ROOT / page).read_text(encoding="utf-8")
        missing += [(page, name) for name in site.targets(text) if not (ROOT / page).parent.joinpath(name).exists()]
    assert missing == []


def test_a_user_reads_before_looking_up_and_looks_up_before_changing(site: ModuleType) -> None:
    listed = list(site.pages(site.settings()["nav"]))
    order = ["README.md", "docs/guide.md", "docs/operations.md", "docs/glossary.md", "docs/internals/design.md"]
    assert sorted(order, key=listed.index) == order


def test_links_to_sources_become_names_and_those_to_nothing_stay_for_mkdocs_to_find(
    site: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "code.py").write_text("")
    (tmp_path / "other.md").write_text("")
    page = tmp_path / "page.md"
    text = "[a](code.py) [b](other.md#x) [c](gone.md) [d](https://d.d) [e](#e) ![f](f.png)"
    said = site.shown(page, text, {page, tmp_path / "other.md"})
    assert said == "a [b](other.md#x) [c](gone.md) [d](https://d.d) [e](#e) ![f](f.png)"


def test_a_new_version_is_the_one_that_the_site_opens_with_and_old_ones_stay(site: ModuleType, tmp_path: Path) -> None:
    for version in ("0.1", "0.2", "0.2"):
        assert site.with_version(tmp_path, version) == tmp_path / version
    known = json.loads((tmp_path / "versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in known] == [("0.2", ["latest"]), ("0.1", [])]
    assert 'url=0.2/"' in (tmp_path / "index.html").read_text()


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_workflows_run_targets_of_the_makefile_and_nothing_else() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    ran = set()
    for file in WORKFLOWS:
        for name, job in yaml.safe_load(file.read_text())["jobs"].items():
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), name
                made = step.get("run", "make check").replace("${{ matrix.target }}", " ").split()
                assert made[0] == "make", step
                ran |= set(made[1:]) | set(job.get("strategy", {}).get("matrix", {}).get("target", ()))
    assert ran >= {"check", "test", "test-ci", "test-oldest", "test-full", "docs"}
    assert ran <= targets


def test_mkdocs_is_pinned_and_no_part_of_the_environment_of_tests() -> None:
    pinned = (ROOT / "tools/site-requirements.txt").read_text().split("\n")
    assert any(line.startswith("mkdocs-material==") for line in pinned)
    assert all("==" in line for line in pinned if line and not line.startswith("#"))
    assert "mkdocs" not in (ROOT / "pyproject.toml").read_text()
