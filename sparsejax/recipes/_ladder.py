"""Runs transformations one after the other, with different messages and one state."""

from __future__ import annotations

import optax

from sparsejax._views import two_views


def ladder(rungs, steps, workers):
    """Runs each of `rungs` for `steps` steps, and the last forever, on one state."""

    def update(updates, state, params=None, **extra_args):
        def climb(rungs, i=1):
            here, *higher = rungs

            def stay():
                return here.update(updates, state, params, **extra_args)

            if not higher:
                return stay
            return lambda: workers.cond(
                state.step < i * steps, stay, climb(higher, i + 1)
            )

        return climb(rungs)()

    return optax.GradientTransformationExtraArgs(
        rungs[0].init, two_views(update, workers)
    )
