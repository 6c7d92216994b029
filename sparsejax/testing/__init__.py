"""The contract of a method, for authors: the checks that every recipe passes.

Import it as `from sparsejax import testing`, or `import sparsejax.testing`.
"""

from sparsejax.testing._choices import check_choices
from sparsejax.testing._contract import check_contract
from sparsejax.testing._devices import (
    check_devices_equal_simulation,
    check_no_recompilation,
    check_replicas_equal,
    check_unchecked_types,
    check_wire_bytes,
)
from sparsejax.testing._mass import (
    check_conservation,
    check_few_coordinates,
    check_one_worker,
)
from sparsejax.testing._memory import check_memory
from sparsejax.testing._shapes import (
    check_abstract_init,
    check_replicated,
    check_state_types,
    check_strict_promotion,
    check_update_types,
    check_wide_types,
)
from sparsejax.testing._steps import (
    check_dense_mean,
    check_nonfinite,
    check_tiny_tree,
    check_zero_gradients,
)

__all__ = [
    "check_abstract_init",
    "check_choices",
    "check_conservation",
    "check_contract",
    "check_dense_mean",
    "check_devices_equal_simulation",
    "check_few_coordinates",
    "check_memory",
    "check_no_recompilation",
    "check_nonfinite",
    "check_one_worker",
    "check_replicas_equal",
    "check_replicated",
    "check_state_types",
    "check_strict_promotion",
    "check_tiny_tree",
    "check_unchecked_types",
    "check_update_types",
    "check_wide_types",
    "check_wire_bytes",
    "check_zero_gradients",
]
