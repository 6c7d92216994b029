"""Every public name is documented, its example runs, and the pages show it."""

from __future__ import annotations

import doctest
import functools
import inspect
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import sparsejax
from sparsejax import recipes, testing
from sparsejax.recipes._table import TABLE

pytestmark = pytest.mark.newer_waits

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = (
    "exchanges",
    "memories",
    "partitions",
    "parts",
    "sparsifiers",
    "testing",
    "thresholds",
    "vectors",
)


def _public():
    for name in sparsejax.__all__:
        if name not in PACKAGES:
            yield f"sparsejax.{name}", getattr(sparsejax, name)
    for package in PACKAGES:
        module = getattr(sparsejax, package)
        for name in module.__all__:
            yield f"sparsejax.{package}.{name}", getattr(module, name)


PUBLIC = dict(_public())
CHECKS = {f"sparsejax.testing.{name}" for name in testing.__all__} - {
    "sparsejax.testing.check_contract"
}
every_name = pytest.mark.parametrize("name", PUBLIC)
parts = tuple(f"sparsejax.{package}." for package in PACKAGES)


def _sections(docstring):
    return set(re.findall(r"^(\w[\w ]*):", inspect.cleandoc(docstring), re.MULTILINE))


@every_name
def test_docstring(name):
    documented = PUBLIC[name]
    docstring = documented.__doc__ or ""
    assert len(docstring.splitlines()[0]) > 20, "one line that describes the object"
    # The example of `check_contract` runs the others, which take a while to compile.
    if name not in CHECKS:
        assert "Example" in _sections(docstring)
        # Pytest runs the example with all other doctests.
        assert doctest.DocTestParser().get_examples(docstring)
    if inspect.isclass(documented):
        fields = getattr(documented, "_fields", ())
        for field in fields if len(fields) > 1 else ():
            assert re.search(rf"^ *{field}: ", docstring, re.MULTILINE), field
        return
    named = [p for p in inspect.signature(documented).parameters if p[0] != "_"]
    for parameter in named:
        assert re.search(rf"^ *{parameter}: ", docstring, re.MULTILINE), parameter
    if not name.startswith(parts):
        assert "Returns" in _sections(docstring) or documented is (
            sparsejax.check_replicas
        )


def test_pages_show_every_name(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api" / "index.html").read_text()
    shown = set(re.findall(r'id="(sparsejax[\w.]*)"', page))
    assert set(PUBLIC) <= shown, sorted(set(PUBLIC) - shown)
    reports = (tmp_path / "reports" / "index.html").read_text()
    for field in sparsejax.Report._fields:
        assert f"<code>{field}</code>" in reports
    evidence = (tmp_path / "guides" / "evidence" / "index.html").read_text()
    assert evidence.count("<td>exdyna</td>") == 3
    assert evidence.count('src="data:image/png') == 2


def test_every_recipe_is_in_the_tables():
    assert set(TABLE) == set(recipes.__all__)
    for page in ("how_it_works.md", "guides/choosing.md"):
        text = (ROOT / "docs" / page).read_text()
        missing = [name for name in TABLE if f"`{name}`" not in text]
        assert not missing, (page, missing)


def _accepts(make, *args, **options):
    """Whether a recipe accepts options that others refuse when they are built."""
    try:
        make(*args, **options)
    except (TypeError, ValueError):
        return False
    return True


def _options_of(name):
    """Cells of the table of options in `choosing.md`, from trying them."""
    row = TABLE[name]
    make, takes = row.recipe, inspect.signature(row.recipe).parameters
    need = dict(row.arguments)
    schedule = {"density": lambda step: 0.1, "max_density": 0.1}
    pair = {"value_bits": (16, 8)}
    width = "a number or a pair" if _accepts(make, **pair, **need) else "a number"
    late = ("no", "one step late", "two steps late")
    tx = make(**need)
    lag = (
        sparsejax.delayed(tx).parts.exchange.lag
        if _accepts(sparsejax.delayed, tx)
        else 0
    )
    one = sparsejax.simulate(tx, workers=1)
    here = functools.partial(one.update, present=jnp.ones(1, bool))
    state = jax.eval_shape(one.init, jnp.zeros(99))
    present = _accepts(jax.eval_shape, here, jnp.zeros((1, 99)), state)
    yes = {True: "yes", False: "no"}
    return [
        yes[_accepts(make, **schedule, **need)],
        width if "value_bits" in takes else "no",
        yes["exchange" in takes],
        late[lag],
        yes[present],
    ]


def test_the_table_of_options():
    text = (ROOT / "docs" / "guides" / "choosing.md").read_text()
    (table,) = re.findall(r"^\| recipe \| schedule .*\n\|.*\n((?:\|.*\n)+)", text, re.M)
    told = {}
    for line in table.splitlines():
        first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        told |= dict.fromkeys(re.findall(r"`(\w+)`", first), cells)
    assert told == {name: _options_of(name) for name in TABLE}
    with pytest.raises(TypeError, match="take a schedule") as refused:
        sparsejax.chunked_topk(lambda step: 0.1)
    named = set(re.findall(r"`(\w+)`", str(refused.value).partition("Only")[2]))
    assert named - {"density"} == {n for n, cells in told.items() if cells[0] == "yes"}
