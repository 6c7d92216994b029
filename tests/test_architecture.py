"""Imports point one way, and only one file communicates or branches."""

from __future__ import annotations

import ast
import pathlib

import pytest

import sparsejax

ROOT = pathlib.Path(sparsejax.__file__).parent

# A module may import from strictly lower layers, and from its own package.
LAYERS = (
    {"_base", "_checks", "_nesting", "_characteristics"},
    {"_labels", "_layout", "_workers", "_bits", "_in_place"},
    {"_selection", "_partition", "_owners", "_codec", "_placement", "_gradients"}
    | {"thresholds"},
    {"sparsifiers", "exchanges", "memories"},
    {
        "_transform",
        "_reports",
        "_simulation",
        "_accounting",
        "_model_shards",
        "_replicas",
        "_resize",
    },
    {"recipes", "_hlo", "_choice", "_predict"},
    {"__init__"},
    {"examples"},
    {"bench"},
)
COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "pshuffle",
    "psum_scatter", "pcast", "pvary", "axis_index", "axis_size", "pbroadcast",
}  # fmt: skip
BRANCHES = {"cond", "switch"}


def _modules():
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        yield relative, ast.parse(path.read_text())


def _layer(module):
    found = [i for i, names in enumerate(LAYERS) if module in names]
    assert len(found) == 1, f"{module} belongs to no layer; add it to LAYERS"
    return found[0]


def _imported(tree):
    """Top-level parts of the package that a module imports when it runs."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "sparsejax":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith("sparsejax."):
                yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("sparsejax."):
                    yield alias.name.split(".")[1]


MODULES = list(_modules())
every_module = pytest.mark.parametrize(
    ("path", "tree"), MODULES, ids=[str(path) for path, _ in MODULES]
)


@every_module
def test_imports_point_down(path, tree):
    own = path.parts[0].removesuffix(".py")
    for imported in _imported(tree):
        if own == "examples":
            continue  # they use the public names, as users do
        if imported != own:
            assert _layer(imported) < _layer(own), f"{path} imports {imported}"


@every_module
def test_only_workers_communicates(path, tree):
    if path.parts[0] in ("_workers.py", "examples", "bench"):
        return
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "lax"
    }
    used |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "jax.lax"
        for alias in node.names
    }
    assert not used & COLLECTIVES
    assert not used & BRANCHES, "branch through `workers.cond`"


def test_the_checks_above_can_fail():
    source = "import jax\nfrom sparsejax._transform import sparsify\n"
    assert list(_imported(ast.parse(source))) == ["_transform"]
    workers = next(tree for path, tree in MODULES if path.name == "_workers.py")
    attributes = {n.attr for n in ast.walk(workers) if isinstance(n, ast.Attribute)}
    assert attributes >= {"psum", "all_gather", "cond"}


def test_public_names_exist_and_are_documented():
    assert sorted(sparsejax.__all__) == list(sparsejax.__all__)
    for name in sparsejax.__all__:
        assert getattr(sparsejax, name).__doc__, name


def test_typed_marker_is_shipped():
    assert (ROOT / "py.typed").exists()
