"""Which units are not zero, and how many coordinates a unit has."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax import sparsifiers
from sparsejax._layout import Layout


def test_nonzero_chooses_rows():
    layout = Layout.of({"a": jnp.zeros((5, 6)), "b": jnp.zeros((2, 4))})
    assert layout.row_size == 2
    vector = jnp.zeros(38).at[jnp.array([1, 7, 37])].set(jnp.array([3.0, jnp.nan, -1]))
    chooser = sparsifiers.nonzero(0.2)
    payload, _ = chooser.select(vector, (), 0, None, layout)
    np.testing.assert_array_equal(payload.indices, [0, 3, 18, 19])
    np.testing.assert_array_equal(
        payload.values, [[0, 3], [0, np.nan], [0, -1], [0, 0]]
    )
    assert payload.demand == 3
    assert payload.complete
    small, _ = sparsifiers.nonzero(0.1).select(vector, (), 0, None, layout)
    assert small.demand == 3
    assert not small.complete
    single, _ = sparsifiers.nonzero(0.1, rows=False).select(vector, (), 0, None, layout)
    np.testing.assert_array_equal(single.indices, [1, 7, 37, 38])


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
