"""Puts tables and pictures of `bench quality` into a page."""

from __future__ import annotations

import base64
import io
import json
import pathlib
import re

from sparsejax.bench import quality

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"
# A mark names a task or a picture, and the file of its runs.
_MARK = re.compile(r"<!-- evidence: (\w+) of (\w+)\.json -->")
_PICTURES = {
    "bytes": (quality.quality_against_bytes, "Quality against bytes"),
    "seconds": (quality.loss_against_seconds, "Training loss against seconds"),
}


def on_page_markdown(markdown, **_):
    """Returns the text of a page, with its marks replaced by tables and pictures."""
    return _MARK.sub(lambda mark: _made(mark[1], mark[2]), markdown)


def _made(name, file):
    stored = json.loads((FOLDER / f"{file}.json").read_text())
    if name in _PICTURES:
        return _picture(*_PICTURES[name], stored)
    lines = [line for line in quality.summarise(stored) if line.task == name]
    return _table(quality.format_lines(lines))


def _table(rows):
    keys = list(rows[0])
    cells = [keys, ["---"] * len(keys), *([row[key] for key in keys] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _picture(draw, text, stored):
    import matplotlib

    matplotlib.use("agg")
    figure = draw(stored)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    matplotlib.pyplot.close(figure)
    data = base64.b64encode(out.getvalue()).decode()
    return f'<img alt="{text}" src="data:image/png;base64,{data}">'
