"""The documentation site: pages under the paths that they have in the repository.

mkdocs.yml names this file as a hook. Pages link to each other, to README.md and to
files of benchmarks/ by relative paths, which GitHub follows. The site has the same
tree, so the same links work there, and `mkdocs build --strict` checks all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CODE = re.compile(r"<code>.*?</code>")
NESTED = re.compile(r"^ {2,3}(?=(?:[-*]|\d+\.) )", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all pages and every file that they link to."""
    for file in list(files):
        if Path(file.abs_src_path or "").is_relative_to(config.docs_dir):
            files.remove(file)
    for path in sorted(_paths()):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Indent nested lists by four blanks, which Python-Markdown demands."""
    code = [*FENCE.findall(markdown), ""]
    text = [NESTED.sub("    ", part) for part in FENCE.split(markdown)]
    return "".join(map("".join, zip(text, code, strict=True)))


def on_page_content(html: str, **_: Any) -> str:
    """Let long names in the cells of tables break after `_`, `/` and `=`."""

    def breakable(code: re.Match[str]) -> str:
        return re.sub(r"(?<=[^<][_/=])(?=\w)", "<wbr>", code[0])

    return CELL.sub(lambda cell: CODE.sub(breakable, cell[0]), html)


def _paths() -> Iterator[str]:
    yield "docs/site.css"
    pages = {*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"}
    pages.add(ROOT / "benchmarks" / "results" / "README.md")
    linked = {
        (page.parent / target).resolve()
        for page in pages
        for target in LINK.findall(FENCE.sub("", page.read_text()))
    }
    for file in pages | {file for file in linked if file.suffix != ".md"}:
        if file.is_file() and file.is_relative_to(ROOT):
            yield file.relative_to(ROOT).as_posix()
