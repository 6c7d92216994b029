"""Makes the site of the pages: links of the repository, and rendered notebooks."""

from __future__ import annotations

import json
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parent.parent
# Pages whose text is a file in the repository's root.
FROM_ROOT = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}


def on_files(files, config, **_):
    """Adds a page for each notebook, and the files that the README links to."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        uri = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, uri, content=_page(path)))
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    """Returns the text of a page, with its links turned into links between pages."""
    if name := FROM_ROOT.get(page.file.src_uri):
        markdown = (ROOT / name).read_text().replace("](docs/", "](")
    markdown = re.sub(r"\]\((?:\.\./)+README\.md", _to_index(page), markdown)
    depth = "../" * page.file.src_uri.count("/")
    return re.sub(
        r"\]\((?:\.\./)*notebooks/(\w+)\.ipynb", rf"]({depth}notebooks/\1.md", markdown
    )


def _to_index(page):
    return "](" + "../" * page.file.src_uri.count("/") + "index.md"


def _page(path):
    """A notebook as Markdown: text, code, printed text and images, as saved."""
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell))


def _cell(cell):
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield text
        return
    yield f"```python\n{text}\n```"
    for output in cell["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).replace("\n", "")
            source = f"data:image/png;base64,{image}"
            yield f'<img alt="Plot of the cell above" src="{source}">'
            continue
        printed = "".join(output.get("text", data.get("text/plain", "")))
        if printed:
            yield f"```text\n{printed.rstrip()}\n```"
