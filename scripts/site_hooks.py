"""What MkDocs does for our site besides its own: pages from outside docs/, links between all of them, the nav.

Every page stays where people read it on a code host, with links that work there. On the site README.md is the first
page, examples/NAME/README.md are pages with a gallery before them, and the reference has a page for each public module.
A link to any other file of the repository brings that file onto the site.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parent.parent
PLACES: Final = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}  # fmt: skip
"""Where files of the repository's root are on the site."""
GALLERY: Final = "examples/index.md"
EXAMPLES: Final = ROOT / "examples" / "README.md"
SOURCES: Final = {GALLERY: EXAMPLES}
"""Where links of pages that are made here begin."""
PICTURES: Final = frozenset({".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp"})
FENCED: Final = re.compile(r"^(`{3,}|~{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
LINK: Final = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ELSEWHERE: Final = re.compile(r"[a-z][a-z0-9+.-]*:|//|/")
LOADED: Final = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?\s(?:src|href)=["']?(?:https?:)?//""")

REFERENCE: Final = {
    "batchmaker": ("Models and engines", "What `import batchmaker as bm` gives."),
    "batchmaker.graph.values": ("Handles", "What a cell call returns inside `unfold`."),
    "batchmaker.engine": ("Answers and counts", "What an engine hands out besides results."),
    "batchmaker.sampling": ("Sampling", "Tokens from scores, and random numbers from a request's seed and step."),
    "batchmaker.errors": ("Errors", "Every error that is raised on purpose."),
    "batchmaker.server": ("Server", "Settings of `batchmaker serve`, and how a model appears as tensors."),
    "batchmaker.client": ("Client", "Values of a server's answer as they come."),
    "batchmaker.policies": ("Policies", "What decides which work runs next. See also the [list](../policies.md)."),
    "batchmaker.lab.zoo": ("Networks", "The networks that come with the package."),
    "batchmaker.lab.datasets": ("Datasets", "Readers of data sets, and seeded generators."),
    "batchmaker.cost": ("Costs", "What is known of the time that cells take."),
    "batchmaker.kernels": ("Kernels", "Recurrent layers whose weights stay on a GPU's chip."),
}
"""Title and first line of each public module's page, in order."""
ALSO: Final = {
    "batchmaker.server": [
        f"batchmaker.server.config.{name}" for name in ("ModelEntry", "AuthConfig", "TlsConfig", "LogConfig")
    ]
    + ["batchmaker.server.limits.Limits"],
}
"""What a module's page has besides what the module lists."""


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/, and everything that a page links to."""
    for source, place in PLACES.items():
        files.append(_taken(ROOT / source, place, config))
    for page in _example_pages():
        files.append(_taken(page, _place(page), config))
        for picture in sorted(page.parent.rglob("*")):
            if picture.suffix in PICTURES:
                files.append(_taken(picture, _place(picture), config))
    for page in sorted((ROOT / "papers").rglob("*.md")):
        files.append(_taken(page, _place(page), config))
    if _example_pages():  # examples/README.md has the same place
        files.append(File.generated(config, GALLERY, content=_gallery()))
    for module, (title, about) in REFERENCE.items():
        shown = set() if module == "batchmaker" else set(_public_names("batchmaker"))
        listed = [f"{module}.{name}" for name in _public_names(module) if name not in shown]
        names = [name for name in listed if name not in REFERENCE] + ALSO.get(
            module, []
        )  # some have a page of their own
        text = "\n\n".join([f"# {title}", f"`{module}`: {about}", *(f"::: {name}" for name in names)])
        files.append(File.generated(config, f"reference/{module.rpartition('.')[2]}.md", content=text))
    for page in list(files.documentation_pages()):
        for target in _linked(page):
            if target.is_file() and target.is_relative_to(ROOT) and files.get_file_from_path(_place(target)) is None:
                files.append(_taken(target, _place(target), config))
    config.nav = list(_filled(config.nav or [], files, _named(config.nav or [])))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    source = page.file.abs_src_path or SOURCES.get(page.file.src_uri)
    if source is None:  # made here, without links to files
        return markdown

    def turned(link: re.Match[str]) -> str:
        if ELSEWHERE.match(link[2]):
            return link[0]
        target = (Path(source).parent / link[2]).resolve()
        for place in (_place(target), _place(target / "README.md"), f"{_place(target)}/index.md"):
            if files.get_file_from_path(place) is not None:
                return link[1] + os.path.relpath(place, Path(page.file.src_uri).parent) + link[3]
        return link[0]  # MkDocs warns of it

    return _outside_code(markdown, lambda prose: LINK.sub(turned, prose))


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that loads something from elsewhere."""
    loaded = LOADED.search(output)
    if loaded is not None:
        tag = output[loaded.start() :].partition(">")[0]
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {tag}>. Put it into the repository.")
    return output


def _place(path: Path) -> str:
    """Return where a file of the repository is on the site, if it is there."""
    if not path.is_relative_to(ROOT):
        return str(path)
    name = path.relative_to(ROOT).as_posix()
    if name.startswith("examples/") and path.name == "README.md":
        return name.removesuffix("README.md") + "index.md"
    return PLACES.get(name, name.removeprefix("docs/"))


def _taken(path: Path, place: str, config: MkDocsConfig) -> File:
    return File.generated(config, place, abs_src_path=str(path))


def _example_pages() -> list[Path]:
    return sorted((ROOT / "examples").glob("*/README.md"))


def _public_names(module: str) -> list[str]:
    """Return what a module lists as public; without such a list, the classes and functions that it defines."""
    path = ROOT / "src" / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8"))
    defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            defined = ast.literal_eval(node.value)
    return [name for name in defined if not name.startswith("_")]


def _gallery() -> str:
    """Return the examples' own first page, if there is one, then the title, first lines and first picture of each."""
    parts = ["# Examples\n\nEach is a folder of `examples/`, and runs as it is."]
    if EXAMPLES.is_file():
        parts = [EXAMPLES.read_text(encoding="utf-8").strip()]
    for page in _example_pages():
        text, name = page.read_text(encoding="utf-8"), page.parent.name
        prose = FENCED.sub("", text)
        title = re.search(r"^# (.+)$", prose, re.MULTILINE)
        parts.append(f"## [{title[1] if title else name}]({name}/index.md)")
        blocks = [block.strip() for block in prose.split("\n\n")]
        said = [block for block in blocks if re.match(r"[A-Za-z0-9`*\[]", block)]
        parts.extend(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block) for block in said[:1])
        picture = re.search(r"!\[([^\]]*)\]\(([^):\s]+)\)", prose)
        if picture is not None:
            parts.append(f"[![{picture[1]}]({name}/{picture[2]})]({name}/index.md)")
    return "\n\n".join(parts) + "\n"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to what stands outside fenced code."""
    parts, end = [], 0
    for fence in FENCED.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _linked(page: File) -> Iterator[Path]:
    """Yield the files that a page links to."""
    source = page.abs_src_path or SOURCES.get(page.src_uri)
    if source is None:
        return
    prose = FENCED.sub("", Path(source).read_text(encoding="utf-8"))
    for link in LINK.finditer(prose):
        if not ELSEWHERE.match(link[2]):
            yield (Path(source).parent / link[2]).resolve()


def _named(nav: Any) -> set[str]:
    """Return the pages and stars that a nav names."""
    if isinstance(nav, str):
        return {nav}
    return set().union(*map(_named, nav.values() if isinstance(nav, dict) else nav))


def _filled(nav: list[Any], files: Files, named: set[str]) -> Iterator[Any]:
    """Yield a nav's entries with stars filled in, without pages that are not written and sections without pages."""
    for entry in nav:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            value = list(_filled(value, files, named))
        elif value.endswith("*"):
            value = _starred(value, files, named)
        elif files.get_file_from_path(value) is None:
            continue
        if value:
            yield value if title is None else {title: value}


def _starred(star: str, files: Files, named: set[str]) -> list[str]:
    """Return the pages of a folder in order, its first page first; of docs/ itself those that the nav names nowhere."""
    folder = star.removesuffix("*")
    places = [page.src_uri for page in files.documentation_pages() if page.src_uri not in named]
    within = [p for p in places if p.startswith(folder) and (folder or "/" not in p)]
    return sorted(within, key=lambda place: place not in (f"{folder}index.md", f"{folder}README.md"))
