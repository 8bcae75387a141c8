"""An output that shares memory with an input or another output is refused, in every operation."""

import every_operation
import numpy as np
import pytest
import torch


def _on_one_buffer(first, second):
    """Copies of both arrays whose first bytes are the same."""
    memory = np.zeros(max(first.nbytes, second.nbytes), np.uint8)
    views = [memory[: a.nbytes].view(a.dtype).reshape(a.shape) for a in (first, second)]
    for view, array in zip(views, (first, second), strict=True):
        view[...] = array
    return views


def _pairs():
    """Every output with every input, and with every output before it."""
    for name, operation in every_operation.ALL.items():
        for output in operation.outputs:
            for other in operation.tensors:
                if other == output:
                    break  # the outputs behind it come with it as `other`
                yield name, output, other


# A combine on one rank adds its bias in place.
_ALLOWED = {("expert_parallel::combine", "out", "bias")}


@pytest.mark.parametrize(("name", "output", "other"), list(_pairs()))
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_an_output_that_overlaps_is_refused(kind, name, output, other):
    operation = every_operation.ALL[name]
    shared = dict(zip((output, other), _on_one_buffer(
        operation.tensors[output], operation.tensors[other]), strict=True))  # fmt: skip
    arrays = {**operation.tensors, **shared}
    tensors = {name: kind(array) for name, array in arrays.items()}
    before = {name: array.copy() for name, array in arrays.items()}
    if (name, output, other) in _ALLOWED:
        operation.call(**tensors)
        return
    with pytest.raises(ValueError) as caught:
        operation.call(**tensors)
    text = str(caught.value).replace("rank 0: ", "")
    start = f"{name.split(',')[0]}: {output}: want memory apart from {other}"
    assert text.startswith(start), text
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("name", every_operation.ALL)
def test_views_that_interleave_without_touching_are_taken(name):
    """Every output in a buffer whose other rows are an input or another output: nothing is refused,
    and the results are those of tensors of their own."""
    operation = every_operation.ALL[name]
    want = {o: np.array(operation.tensors[o]) for o in operation.outputs}
    operation.call(**{**operation.tensors, **want})
    got = {}
    for output in operation.outputs:
        array = operation.tensors[output]
        if array.ndim == 1:
            continue  # has no rows to interleave
        wide = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
        got[output] = wide[::2]
        got[output][...] = array
        for other, tensor in operation.tensors.items():
            if other not in got and (tensor.shape, tensor.dtype) == (array.shape, array.dtype):
                got[other] = wide[1::2]
                got[other][...] = tensor
                break
    operation.call(**{**operation.tensors, **got})
    for output in got.keys() & want.keys():
        np.testing.assert_array_equal(got[output], want[output])
