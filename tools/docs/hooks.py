"""Hooks of mkdocs for `make docs`: pages from outside docs/, links as the repository has them, and a check for foreign URLs.

Pages are written for the repository: `../examples/own_loss/README.md` in docs/losses.md is a link that works there. The site
has the same tree, except that docs/ is its root, so each link is adapted when its page is made. The target of a link becomes
part of the site: Markdown as a page, source text as a page that shows it, anything else as a file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from tools.docs.links import Link, links, resolved, with_targets
from tools.docs.lists import with_four_spaces

LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".toml": "toml", ".txt": "text"}
"""The kinds of source text that are shown as a page, and the language to highlight each in."""
SOURCE_LAST = "---\nsearch: {boost: 0.01}\n---\n\n"
"""Front matter of those pages: a search finds the pages that explain a word before the files that use it."""
FOREIGN = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//"
    r"|<link\b[^>]*rel=\"?(?:stylesheet|icon|preconnect|preload)[^>]*\bhref=\"?(?:https?:)?//"
    r"|<link\b[^>]*\bhref=\"?(?:https?:)?//[^>]*rel=\"?(?:stylesheet|icon|preconnect|preload)"
    r"|@import\s+[\"']?(?:url\()?[\"']?(?:https?:)?//|url\([\"']?(?:https?:)?//"
)
"""Markup that makes a browser fetch from another server when it opens a page; links to click on are not among it."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside docs/ that pages and the navigation name."""
    added = [path for path in _paths(config.nav or []) if _outside(path)]
    pages = [*added, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    for path in pages:
        for link in links(Path(path).read_text(encoding="utf-8")):
            target = resolved(link, path)
            if link.is_relative and _outside(target) and target not in added and Path(target).is_file():
                added.append(target)
                if target.endswith(".md"):
                    pages.append(target)
    for path in added:
        files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the places of their targets in the site."""
    here = page.file.src_uri
    if page.file.inclusion is InclusionLevel.NOT_IN_NAV:
        return markdown
    path = here if _outside(here) else f"docs/{here}"

    def moved(link: Link) -> str:
        target = resolved(link, path)
        if not link.is_relative or not link.path or not Path(target).is_file():
            return link.target
        return posixpath.relpath(_uri(target), posixpath.dirname(here) or ".") + (
            f"#{link.anchor}" if link.anchor else ""
        )

    return with_four_spaces(with_targets(markdown, moved))


def on_post_build(config: MkDocsConfig) -> None:
    """Fail where a page would fetch anything from another server."""
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css") and (found := FOREIGN.search(path.read_text(encoding="utf-8"))):
            raise PluginError(f"{path} fetches from another server: {found[0]}; serve the file from docs/ instead")


def _outside(path: str) -> bool:
    """Whether the path, of the site or of the repository, is a file outside docs/ (the two have that name in common)."""
    return not path.startswith(("docs/", "..")) and Path(path).is_file()


def _uri(path: str) -> str:
    """The place in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{path}.md" if _is_shown(path) else path


def _is_shown(path: str) -> bool:
    return _outside(path) and Path(path).suffix in LANGUAGES


def _file(path: str, config: MkDocsConfig) -> File:
    if not _is_shown(path):
        return File.generated(config, _uri(path), abs_src_path=str(Path(path).resolve()))
    fence = f"`````{LANGUAGES[Path(path).suffix]}\n{Path(path).read_text(encoding='utf-8').rstrip()}\n`````\n"
    page = f"{SOURCE_LAST}# `{path}`\n\n{fence}"
    return File.generated(config, _uri(path), content=page, inclusion=InclusionLevel.NOT_IN_NAV)


def _paths(nav: list) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            if isinstance(value, list):
                yield from _paths(value)
            else:
                yield value
