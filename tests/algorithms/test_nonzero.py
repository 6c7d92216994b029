"""The sparsifier `nonzero`: the non-zero units, and the coordinates of a unit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import sparsifiers
from sparsejax._layout import Layout
from sparsejax.parts import Step


def test_nonzero_chooses_rows():
    layout = Layout.of({"a": jnp.zeros((5, 6)), "b": jnp.zeros((2, 4))})
    assert layout.row_size == 2
    vector = jnp.zeros(38).at[jnp.array([1, 7, 37])].set(jnp.array([3.0, jnp.nan, -1]))

    def choose(*arguments, **options):
        sparsifier = sparsifiers.nonzero(*arguments, **options)
        assert sparsifier.lossless
        choice, _ = sparsifier.select(vector, (), Step(jnp.int32(0), None, layout))
        return choice

    rows = choose(0.2)
    np.testing.assert_array_equal(rows.indices, [0, 3, 18, 19])
    assert (rows.row_size, rows.demand) == (2, 3)
    small = choose(0.1)
    np.testing.assert_array_equal(small.indices, [0, 3])
    assert (small.row_size, small.demand) == (2, 3)
    single = choose(0.1, rows=False)
    np.testing.assert_array_equal(single.indices, [1, 7, 37, 38])
    assert (single.row_size, single.demand) == (1, 3)


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), ("1", TypeError)])
def test_nonzero_names_its_argument(value, error):
    with pytest.raises(error, match=r"max_density: got .*in \(0, 1\]"):
        sparsifiers.nonzero(value)


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ([(5, 6)], 6),
        ([(5, 6), (3, 4, 2)], 2),
        ([(5, 6), (7,)], 1),
        ([(5, 6), ()], 1),
        ([(5, 6), (0, 5)], 6),
        ([], 1),
        ([(0,)], 1),
    ],
)
def test_rows_divide_every_leaf(shapes, size):
    assert Layout.of([jnp.zeros(shape) for shape in shapes]).row_size == size
