"""Arrays with gaps, permuted dimensions, negative strides and strides of 0."""

import math

import numpy as np
from hypothesis import strategies as st

GAP = 99


def lay_out(array, *, order=None, steps=None, before=0, after=0, dense=1):
    """A view with the array's values. Its base is all the memory, which holds GAP elsewhere.

    The last `dense` dimensions are contiguous, with `before` and `after` elements around them. The
    others are stored in `order`, outermost first, with `steps` between elements; a negative step
    goes backwards, and with 0 all elements are the first one.
    """
    outer, inner = array.ndim - dense, math.prod(array.shape[array.ndim - dense :])
    order = range(outer) if order is None else order
    steps = [1] * outer if steps is None else steps
    lengths = [n if step else min(n, 1) for n, step in zip(array.shape, steps, strict=False)]
    room = [lengths[d] * max(abs(steps[d]), 1) for d in order]
    memory = np.full([*room, before + inner + after], GAP, array.dtype)
    places = [slice(None, None, steps[d] or 1) for d in order]
    view = memory[(*places, slice(before, before + inner))]
    view = view.transpose(*np.argsort(order), outer).reshape(*lengths, *array.shape[outer:])
    view[...] = array[tuple(map(slice, lengths))]
    if all(steps):
        return view
    strides = [s if step else 0 for s, step in zip(view.strides, steps, strict=False)]
    return np.lib.stride_tricks.as_strided(view, array.shape, [*strides, *view.strides[outer:]])


# The arguments of lay_out() for a number of outer dimensions.
LAYOUTS = {
    "gaps": lambda outer: {"steps": [2] * outer},
    "transposed": lambda outer: {"order": range(outer)[::-1]},
    "inside-a-larger": lambda outer: {"steps": [3] * outer, "before": 1, "after": 2},
    "backwards": lambda outer: {"steps": [-1] * outer},  # only numpy has these
    "expanded": lambda outer: {"steps": [0] + [1] * (outer - 1)},  # not for outputs
}


@st.composite
def layouts(draw, array, backwards=True, repeats=True, dense=1):
    """The array in a layout that hypothesis draws."""
    outer = array.ndim - dense
    step = st.sampled_from([1, 1, 2, 3] + [-1, -2] * backwards + [0] * repeats)
    return lay_out(
        array,
        order=draw(st.permutations(range(outer))),
        steps=draw(st.lists(step, min_size=outer, max_size=outer)),
        before=draw(st.integers(0, 3)),
        after=draw(st.integers(0, 3)),
        dense=dense,
    )
