"""Comparison with the oracle: special values by position, then each element, then the whole."""

import numpy as np

EPS32 = 2.0**-23

# Relative to the tensor's largest magnitude, by dtype; lse and max_logits absolute.
TOLERANCE = {
    "out": {"float32": 2e-5, "float16": 1e-2, "bfloat16": 1e-2},
    "dq": {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2},
    "dkv": {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2},
    "d_sink": {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2},
    "attn_sum": {"float32": 2e-4, "float16": 1e-3, "bfloat16": 1e-3},
    "lse": {"float32": 1e-5, "float16": 1e-4, "bfloat16": 1e-4},
    "paged": {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2},
}
DOUBLE = 1e-11  # of float64, whatever the quantity


def assert_close(got, want, quantity, dtype="float32"):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    for special in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(special(got), special(want))
    finite = np.isfinite(want)
    if not finite.any():
        return
    largest = np.abs(want[finite]).max()
    error = np.abs(got[finite] - want[finite]).max()
    tolerance = DOUBLE if dtype == "float64" else TOLERANCE[quantity][dtype]
    if quantity == "lse":
        limit = tolerance + (0 if dtype == "float64" else 8 * EPS32) * largest
    else:
        limit = tolerance * max(largest, 1e-30)
    assert error <= limit, f"{quantity}: {error:.3g} from the oracle, {limit:.3g} allowed"
