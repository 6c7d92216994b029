"""Eight virtual devices, quick compilation, strict shapes, and two tiers of tests."""

from __future__ import annotations

import gc
import itertools
import os
import pathlib
import random
import zlib

from tests import quick

# XLA reads its flags once, so this precedes the first import of jax.
os.environ["XLA_FLAGS"] = quick.flags(given=os.environ.get("XLA_FLAGS", ""))
os.environ |= quick.kept_programs() | os.environ

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# Traces make many long-lived objects, and searching them for garbage took a twentieth
# of the time.
gc.set_threshold(20_000)

# The kernel allows a process about 65,000 mappings; beyond them the compiler aborts.
_MOST_MAPPINGS = 40_000
# Counting many mappings takes 50 ms, so they are counted once in this many tests.
_COUNTED = 20


# Groups that take half a minute or longer. They start first, so that no process still
# works on one of them when the others have nothing left.
_LONG = (
    "processes",
    "test_zen",
    "notebooks",
    "test_pages",
    "test_pmap",
    "test_pairings",
    "w4",
    "exdyna",
    "test_text",
    "test_wire",
    "test_delayed",
    "test_accumulate",
    "test_density_schedule",
    "test_baselines",
    "test_model_axes",
    "test_bench",
)


# Recipes that run every test of the contract in the first tier. They exchange a union,
# pairs, and a ring of signs.
_REPRESENTATIVE = ("exdyna", "topk", "marsit")
# The first tier runs one in this many rows of a test that is marked `sampled`.
_SAMPLED = 16
# Marks of tests that wait for the second tier.
WAITING = ("second_tier",)
if jax.__version_info__ >= (0, 11):  # Compiling takes three times as long.
    _REPRESENTATIVE, _SAMPLED = ("exdyna",), 32
    WAITING = ("second_tier", "newer_waits")
# The second tier has this many slices of rows; CI runs one slice per commit.
SLICES = 16
# For tests/test_tiers.py: the rows of each test, and its rows in the first tier.
TIERS = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--rows",
        choices=("few", "every", *(f"few+{k}" for k in range(SLICES))),
        help="default: few when all tests run, and every for tests that are "
        f"named; few+K adds slice K of the other rows, of which there are {SLICES}",
    )


def pytest_configure(config):
    if config.getoption("rows") is None:  # xdist hands the answer to its processes
        all_run = config.args_source is config.ArgsSource.TESTPATHS
        few = all_run and not config.getoption("keyword")
        config.option.rows = "few" if few else "every"


@pytest.fixture(scope="module")
def every(request):
    """Whether long runs make all of their steps: with every row, and in one slice.

    Each file has a slice of its own for this, so that no slice has all the long runs.
    """
    rows = request.config.getoption("rows")
    return rows == "every" or rows == f"few+{slice_of(request.path.stem)}"


def slice_of(file):
    return zlib.adler32(file.encode()) % SLICES


def waits(row):
    return any(row.get_closest_marker(mark) for mark in WAITING)


def _first_tier(rows):
    """The rows of one test that belong to the first tier.

    There is at least one, unless all rows wait.
    """
    from tests.cases import RECIPES

    rows = [row for row in rows if not waits(row)]
    if not rows:
        return []
    if hasattr(rows[0], "callspec") and "case" in rows[0].callspec.params:
        cases = [(row, row.callspec.params["case"]) for row in rows]
        few = [
            row
            for row, case in cases
            if case.name in _REPRESENTATIVE
            or (case in RECIPES and row.get_closest_marker("each_recipe"))
        ]
        return few or rows[:1]
    if rows[0].get_closest_marker("sampled"):
        draw = random.Random(rows[0].originalname)
        return draw.sample(rows, -(-len(rows) // _SAMPLED))
    return rows


def _test(item):
    return item.nodeid.partition("[")[0]


def _group(item):
    return item.get_closest_marker("xdist_group").args[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out the second tier, and groups the tests by process."""
    tests = [list(rows) for _, rows in itertools.groupby(items, _test)]
    config.stash[TIERS] = tiers = [(rows, _first_tier(rows)) for rows in tests]
    taken = config.getoption("rows")
    if taken != "every":
        kept = {row for _, few in tiers for row in few}
        if taken != "few":
            later = [row for row in items if row not in kept]
            kept.update(later[int(taken.removeprefix("few+")) :: SLICES])
        config.hook.pytest_deselected(items=[row for row in items if row not in kept])
        items[:] = [row for row in items if row in kept]
    # The tests of a file share compiled programs, so they stay in one process.
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    rank = {group: i for i, group in enumerate(_LONG)}
    items.sort(key=lambda item: rank.get(_group(item), len(_LONG)))


_tests = itertools.count(1)


@pytest.fixture(autouse=True)
def _few_mappings():
    """Frees compiled programs when mappings are many: each program holds dozens."""
    yield
    if next(_tests) % _COUNTED:
        return
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
