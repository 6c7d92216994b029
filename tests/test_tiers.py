"""The first tier of tests has a row of nearly every test, and of every recipe."""

from __future__ import annotations

import collections

import conftest
from tests.cases import RECIPES


def _cases(rows):
    parameters = [getattr(row, "callspec", None) for row in rows]
    return {p.params["case"] for p in parameters if p and "case" in p.params}


def test_the_first_tier_has_a_row_of_each_test_and_recipe(request):
    """Checks the collected tests, which are all tests if all of them run."""
    tiers = request.config.stash[conftest.TIERS]
    waiting = []
    for rows, few in tiers:
        assert set(few) <= set(rows)
        if not few:
            assert all(conftest.waits(row) for row in rows)
            if not rows[0].get_closest_marker("newer_waits"):
                waiting.append(rows[0].nodeid)
    assert len(waiting) <= 3, waiting  # programs of half a minute
    cases = {case for rows, few in tiers for case in _cases(few)}
    if any(rows[0].path.stem == "test_conformance" for rows, _ in tiers):
        assert set(RECIPES) <= cases


def test_long_runs_are_spread_over_the_slices(request):
    """One slice of CI with all long runs took too long."""
    tiers = request.config.stash[conftest.TIERS]
    rows = [row for tests, _ in tiers for row in tests]
    long = {row.path.stem for row in rows if "every" in row.fixturenames}
    files = collections.Counter(conftest.slice_of(file) for file in long)
    assert max(files.values(), default=0) <= 2, files
