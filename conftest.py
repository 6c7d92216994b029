"""Eight virtual devices for all tests, quick compilation, strict shapes."""

from __future__ import annotations

import os
import pathlib

from tests import quick

# XLA reads its flags once, so this precedes the first import of jax.
os.environ["XLA_FLAGS"] = quick.flags(given=os.environ.get("XLA_FLAGS", ""))

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# The kernel allows a process some 65,000 mappings, and the compiler aborts without one.
_MOST_MAPPINGS = 40_000


# Groups that take a minute or longer. They start first, so that no process still works
# on one of them when the others have nothing left.
_LONG = (
    "processes",
    "test_zen",
    "notebooks",
    "test_pages",
    "test_pmap",
    "test_pairings",
    "w4",
    "test_choice",
    "test_wire",
    "test_accumulate",
    "test_density_schedule",
    "test_baselines",
    "test_model_axes",
    "test_bench",
)


def pytest_addoption(parser):
    parser.addoption(
        "--every-recipe",
        action="store_true",
        help="train every recipe in tests/test_jit.py, which takes some minutes",
    )


def _group(item):
    return item.get_closest_marker("xdist_group").args[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The tests of a file share what they compile, so they stay in one process."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    rank = {group: i for i, group in enumerate(_LONG)}
    items.sort(key=lambda item: rank.get(_group(item), len(_LONG)))


@pytest.fixture(autouse=True)
def _few_mappings():
    """Frees compiled programs when they are many: each holds dozens of mappings."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPPINGS:
        jax.clear_caches()
