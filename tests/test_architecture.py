"""Imports point one way, and only one file communicates or branches."""

from __future__ import annotations

import ast
import pathlib

import pytest

import sparsejax

ROOT = pathlib.Path(sparsejax.__file__).parent

# A module may import from strictly lower layers, and from its own package. The longest
# matching name decides the layer.
LAYERS = (
    {"_checks", "_nesting", "_workers"},
    {"_xla"},
    {"vectors"},
    {
        "parts",
        "_labels",
        "_layout",
        "_local_gradient",
        "placement._markers",
        "placement._specs",
    },
    {"partitions", "_gradient", "placement._groups"},
    {"thresholds", "_report", "_views", "_entry", "placement._allocation"},
    {"sparsifiers", "exchanges", "memories"},
    {"_transform"},
    {"recipes", "placement", "planning"},
    {"__init__"},
    {"examples", "testing"},
    {"bench"},
)
# Rooms with limited access: the modules outside that may import each of them.
DOORS = {
    "placement": {"__init__"},
    "placement._markers": {
        "__init__",
        "_transform",
        "_entry",
        "_views",
        "exchanges",
        "planning",
    },
    "placement._specs": {"__init__", "planning"},
    "placement._groups": {"_transform", "_views", "_report"},
    "placement._allocation": {"_transform"},
    "planning": {"__init__"},
    "planning._hlo": {"bench"},
}
# The modules outside that a room may import.
INWARD = {"vectors": {"_workers", "_xla"}, "_xla": {"_workers"}}
MOST_PRIVATE_MODULES = 12
MOST_LINES = 350
COLLECTIVES = {
    "psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "pshuffle",
    "psum_scatter", "pcast", "pvary", "axis_index", "axis_size", "pbroadcast",
}  # fmt: skip
BRANCHES = {"cond", "switch"}


def _modules():
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT)
        yield relative, ast.parse(path.read_text())


def _name(path):
    """The dotted name of a module below the package."""
    parts = [*path.parts[:-1], path.stem]
    return ".".join(parts if parts[-1] != "__init__" or len(parts) == 1 else parts[:-1])


def _entry(module, entries):
    """The longest of `entries` that is `module` or contains `module`, or None."""
    parts = module.split(".")
    names = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((name for name in names if name in entries), None)


def _layer(module):
    found = [i for i, names in enumerate(LAYERS) if _entry(module, ALL) in names]
    assert len(found) == 1, f"{module} belongs to no layer; add it to LAYERS"
    return found[0]


def _imported(tree):
    """Dotted names of the package's modules that a module imports at run time."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            package = node.module.split(".")
            if package[0] != "sparsejax":
                continue
            for alias in node.names:
                inner = ".".join([*package[1:], alias.name])
                yield inner if inner in NAMES else ".".join(package[1:])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("sparsejax."):
                    yield alias.name.removeprefix("sparsejax.")


MODULES = list(_modules())
NAMES = {_name(path) for path, _ in MODULES}
ALL = set().union(*LAYERS)
every_module = pytest.mark.parametrize(
    ("path", "tree"), MODULES, ids=[str(path) for path, _ in MODULES]
)


@every_module
def test_imports_point_down(path, tree):
    own = _name(path)
    room = own.split(".")[0]
    for imported in _imported(tree):
        if room == "examples":
            continue  # they use the public names, as users do
        target = imported.split(".")[0]
        if target != room:
            assert _layer(imported) < _layer(own), f"{path} imports {imported}"
        if target != room and (door := _entry(imported, DOORS)):
            assert room in DOORS[door], f"{path} imports {imported}"
        if target != room and room in INWARD:
            assert target in INWARD[room], f"{path} imports {imported}"


@every_module
def test_one_idea_per_file(path, tree):
    length = len((ROOT / path).read_text().splitlines())
    assert length <= MOST_LINES, f"{path} has {length} lines: look for the second idea"


def test_few_rooms_in_the_hall():
    private = [
        path for path, _ in MODULES if str(path).startswith("_") and not path.parts[1:]
    ]
    assert len(private) - 1 <= MOST_PRIVATE_MODULES, private  # beside `__init__`


def test_no_import_circle():
    """Modules in a circle could not be imported first."""
    graph = {_name(path): set(_imported(tree)) & NAMES for path, tree in MODULES}
    done: set[str] = set()

    def visit(name, above):
        assert name not in above, f"a circle: {[*above, name]}"
        if name not in done:
            for imported in graph[name] - {name}:
                visit(imported, [*above, name])
            done.add(name)

    for name in graph:
        visit(name, [])


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
    source = "from sparsejax.vectors import _bits, compact"
    assert list(_imported(ast.parse(source))) == ["vectors._bits", "vectors"]
    assert _layer("placement._markers") < _layer("_transform") < _layer("placement")
    assert _name(pathlib.Path("exchanges/__init__.py")) == "exchanges"
    workers = next(tree for path, tree in MODULES if path.name == "_workers.py")
    attributes = {n.attr for n in ast.walk(workers) if isinstance(n, ast.Attribute)}
    assert attributes >= {"psum", "all_gather", "cond"}


def test_public_names_exist_and_are_documented():
    assert sorted(sparsejax.__all__) == list(sparsejax.__all__)
    for name in sparsejax.__all__:
        assert getattr(sparsejax, name).__doc__, name


def test_typed_marker_is_shipped():
    assert (ROOT / "py.typed").exists()
