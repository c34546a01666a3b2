#!/usr/bin/env python3
"""Lay out what `make docs` builds the site of: the pages of mkdocs.yml, and the files to which they lead.

    python tools/site.py      fills build/site-source, and writes build/mkdocs.yml, whose navigation names every page

Pages lead to pages and files of the whole repository, and a site has one folder: its source is a copy that keeps their
paths. Links to folders and to sources, which a site does not show, become their names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ROOT / "mkdocs.yml"
SHOWN = {".md", ".png", ".svg", ".json", ".txt", ".yml"}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def pages(navigation: list[Any]) -> Iterator[str]:
    """Paths in the navigation, in reading order; one with `/` at its end is a folder."""
    for entry in navigation:
        if isinstance(entry, str):
            yield entry
            continue
        ((_, below),) = entry.items()
        yield from [below] if isinstance(below, str) else pages(below)


def expanded(navigation: list[Any], root: Path = ROOT) -> list[Any]:
    """The navigation with each folder replaced by its pages that are not named elsewhere, in order of their names."""
    named = set(pages(navigation))

    def within(folder: str) -> list[str]:
        depth = "**/*.md" if folder == "examples/" else "*.md"
        found = (path.relative_to(root).as_posix() for path in sorted((root / folder).glob(depth)))
        return [path for path in found if path not in named]

    def filled(entries: list[Any]) -> list[Any]:
        result: list[Any] = []
        for entry in entries:
            if isinstance(entry, str):
                result += within(entry) if entry.endswith("/") else [entry]
            else:
                ((title, below),) = entry.items()
                result.append({title: below if isinstance(below, str) else filled(below)})
        return result

    return filled(navigation)


def settings() -> dict[str, Any]:
    """What mkdocs.yml says."""
    said: dict[str, Any] = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    return said


def targets(text: str) -> Iterator[str]:
    """What links and pictures of a page lead to, without other hosts and headings of the page itself."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            yield target.partition("#")[0]


def shown(page: Path, text: str, listed: set[Path]) -> str:
    """The text of a page with links to what the site does not show as plain names; missing ones are left to mkdocs."""

    def kept(found: re.Match[str]) -> str:
        said, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group(0)
        path = Path(os.path.normpath(page.parent / target.partition("#")[0]))
        stays = path in listed or path.suffix in SHOWN or not path.exists()
        return found.group(0) if stays else str(said)

    return LINK.sub(kept, text)


def lay_out(folder: Path) -> dict[str, Any]:
    """Copy all pages and the files that they show; returns the settings of the site."""
    said = settings()
    said["nav"] = expanded(said["nav"])
    listed = {ROOT / page for page in pages(said["nav"])}
    shutil.rmtree(folder, ignore_errors=True)
    for page in sorted(listed):
        text = page.read_text(encoding="utf-8")
        for name in targets(text):
            file = Path(os.path.normpath(page.parent / name))
            if file.is_file() and file.suffix in SHOWN - {".md"}:
                copy = folder / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
        copy = folder / page.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(shown(page, text, listed), encoding="utf-8")
    return said


VERSIONS = "versions.json"
"""Which versions a folder of sites has, as the theme's menu of versions reads it (and `mike`, which publishes them)."""
HERE = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">{0}</a>\n'


def with_version(site: Path, version: str) -> Path:
    """The folder of a version in a folder of sites, whose start leads to it; those of other versions stay.

    Args:
        site: The folder of sites.
        version: Such as `0.1`.
    """
    site.mkdir(parents=True, exist_ok=True)
    file = site / VERSIONS
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    others = [one for one in known if one["version"] != version]
    entries = [{"version": version, "title": version, "aliases": ["latest"]}]
    entries += [one | {"aliases": []} for one in others]
    file.write_text(json.dumps(entries, indent=1), encoding="utf-8")
    (site / "index.html").write_text(HERE.format(version), encoding="utf-8")
    return site / version


def main() -> None:
    said = lay_out(ROOT / settings()["docs_dir"])
    build = ROOT / "build"
    release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    said["site_dir"] = with_version(ROOT / said["site_dir"], release.rpartition(".")[0])
    said |= {name: os.path.relpath(ROOT / said[name], build) for name in ("docs_dir", "site_dir")}
    (build / "mkdocs.yml").write_text(yaml.safe_dump(said, sort_keys=False, allow_unicode=True), encoding="utf-8")


if __name__ == "__main__":
    main()
