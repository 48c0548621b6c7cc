"""How the site is built from the repository's own Markdown (hooks of MkDocs).

Every page keeps the path that it has in the repository, so a relative link means the same on the
code host and on the site. Files that pages link to (figures, tables, plans) are part of the site;
a link to a folder leads to a list of its files, one to a notebook to a page with its cells.

$REPOSITORY is the address of the repository: it is linked in the header, and takes the place of the
placeholder in the pages.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import latex2mathml.converter
from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "benchmarks/README.md", "docs/**/*.md", "results/*.md")
ASSETS = ("docs/*.svg", "docs/site/*.css", "docs/site/*.js", "docs/site/*.svg")
PLACEHOLDER = "https://github.com/OWNER/gfsa"
# where the search leads first
BOOST = {"docs/start.md": 8, "docs/transformers.md": 8, "docs/train.md": 2, "docs/faq.md": 0.5}
BOOST |= {"CHANGELOG.md": 0.1, "docs/supported.md": 0.3}
# rows of docs/supported.md that most readers look for, in this order
COMMON = "torch transformers timm bert roberta gpt2 llama qwen3 mistral gemma3 t5 bart whisper"
COMMON += " vit deit swin clip dinov2 vision_transformer swin_transformer"

# the target of an inline link or image, without its title
_LINK = re.compile(r"\]\((?P<target>[^()\s]+)")
# brackets that follow each other, such as config['a']['b'] in a reason, outside of code
_BRACKETS = re.compile(r"(?P<code>```.*?```|`[^`\n]*`)|\]\[", re.DOTALL)
_FENCE = re.compile(r"^(?P<fence> *```+)python no-run *$", re.MULTILINE)
# a picture of its own for dark pages, as the code host takes it
_PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(?P<dark>[^"]+)">\s*'
    r'<img alt="(?P<text>[^"]*)" src="(?P<light>[^"]+)">\s*</picture>'
)
_TWO_PICTURES = r"![\g<text>](\g<light>#only-light)![\g<text>](\g<dark>#only-dark)"


def pages() -> list[str]:
    """The pages of the site by their paths in the repository."""
    found = {path.relative_to(ROOT).as_posix() for glob in PAGES for path in ROOT.glob(glob)}
    return sorted(found)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    # functions cannot be named in a YAML file that other tools read
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [
            {"name": "math", "class": "math", "format": math_block},
        ]
    }
    version = re.search(r'"(.*)"', (ROOT / "src/gfsa/_version.py").read_text(encoding="utf-8"))
    config.copyright = f"gfsa {version[1] if version else ''}, Apache-2.0"
    config.repo_url = os.environ.get("REPOSITORY")
    config.repo_name = "gfsa" if config.repo_url else None
    return config


def math_block(source: str, *_: Any, **__: Any) -> str:
    """A formula as MathML, which browsers draw without a script."""
    return f'<div class="math">{latex2mathml.converter.convert(source, display="block")}</div>'


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for file in list(files):
        # what MkDocs found in docs/ has a path that starts there, not at the repository's root
        if file.src_dir == config.docs_dir:
            files.remove(file)
    paths = {*pages()}
    for glob in ASSETS:
        paths |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob(glob)}
    for page in pages():
        for target in local_targets(page):
            if target.endswith(".ipynb"):
                files.append(notebook_page(target, config))
            elif (ROOT / target).is_file():
                paths.add(target)
            elif (ROOT / target).is_dir() and not (ROOT / target / "README.md").is_file():
                inside = [path for path in sorted((ROOT / target).iterdir()) if path.is_file()]
                paths |= {path.relative_to(ROOT).as_posix() for path in inside}
                files.append(folder_page(target, [path.name for path in inside], config))
    for path in sorted(paths):
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def folder_page(folder: str, names: list[str], config: MkDocsConfig) -> File:
    """A page that lists the files of a folder; it is found by links, not in the navigation."""
    lines = [f"# {folder}", "", *(f"- [{name}]({name})" for name in names)]
    return File.generated(
        config,
        f"{folder}/index.md",
        content="\n".join(lines) + "\n",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )


def notebook_page(path: str, config: MkDocsConfig) -> File:
    """The cells of a notebook and what they printed; it is found by links."""
    parts = []
    for cell in json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", ())))
            if "image/png" in data:
                image = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img alt="output" src="data:image/png;base64,{image}">')
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    return File.generated(
        config,
        str(PurePosixPath(path).with_suffix(".md")),
        content="\n\n".join(parts) + "\n",
        inclusion=InclusionLevel.NOT_IN_NAV,
    )


def local_targets(page: str) -> Iterator[str]:
    """What a page links to inside of the repository, as paths from its root."""
    for match in _LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
        path = unquote(match["target"].partition("#")[0])
        if path and ":" not in path:
            yield resolve(page, path)


def resolve(page: str, target: str) -> str:
    parts: list[str] = []
    for part in (*PurePosixPath(page).parent.parts, *PurePosixPath(target).parts):
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    source = page.file.src_uri
    if source in BOOST:
        page.meta["search"] = {"boost": BOOST[source]}
    if source == "docs/supported.md":
        markdown = common_first(markdown)
    markdown = markdown.replace(PLACEHOLDER, os.environ.get("REPOSITORY", PLACEHOLDER))
    markdown = _PICTURE.sub(_TWO_PICTURES, markdown)
    markdown = markdown.replace(".ipynb)", ".md)")

    def to_page_of_folder(match: re.Match[str]) -> str:
        path = match["target"]
        if ":" in path or "#" in path or not (ROOT / resolve(source, path)).is_dir():
            return match[0]
        has_readme = (ROOT / resolve(source, path) / "README.md").is_file()
        return f"]({path.rstrip('/')}/{'README.md' if has_readme else 'index.md'}"

    # the mark is for the test that runs the snippets
    markdown = _FENCE.sub(r"\g<fence>python", markdown)
    # no page has links by reference, and the code host shows such brackets as they are
    markdown = _BRACKETS.sub(lambda match: match["code"] or r"]\[", markdown)
    return _LINK.sub(to_page_of_folder, markdown)


def common_first(page: str) -> str:
    """Each table of docs/supported.md with the rows that most readers look for at its top."""
    order = COMMON.split()

    def rank(row: str) -> int:
        # a library, or transformers:bert
        name = row.split("|")[1].rpartition(":")[2].strip()
        return order.index(name) if name in order else len(order)

    def ordered(table: re.Match[str]) -> str:
        return "".join(sorted(table[0].splitlines(keepends=True), key=rank))

    return re.sub(r"(?<=---\|\n)(?:\|.*\n)+", ordered, page)
