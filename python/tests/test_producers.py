"""Tensors whose producers misbehave, and those that do not hold what they show.

Each is refused with its argument named, and exceptions that end the program pass.
"""

import ctypes

import numpy as np
import problems
import pytest
import torch
import winnow.torch
from foreign import Foreign, given

import winnow
from winnow import sparse_mla


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


def _capsule(**fields):
    """One of float32 on the CPU; what it points at lives as long as the process."""
    managed = _Managed(device_type=1, code=2, bits=32, lanes=1, **fields)
    _kept.append(managed)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    return new(ctypes.addressof(managed), b"dltensor", None)


_kept: list = []
_SHAPE = (ctypes.c_int64 * 3)(3, 4, 576)
_HUGE = (ctypes.c_int64 * 3)(2**40, 2**40, 576)
_FAR = (ctypes.c_int64 * 3)(2**62, 2**62, 1)


def _capsules():
    shape = ctypes.addressof(_SHAPE)
    return {
        "ndim -1": (_capsule(ndim=-1, shape=shape), "a DLPack tensor with a shape, got -1 dim"),
        "no shape": (
            _capsule(ndim=3),
            "a DLPack tensor with a shape, got 3 dimensions and no shape",
        ),
        "no memory": (
            _capsule(ndim=3, shape=shape),
            "a tensor in memory, got .*Foreign without any",
        ),
        "many dims": (_capsule(ndim=2**30, shape=shape), "at most .* dimensions"),
        "huge": (
            _capsule(ndim=3, shape=ctypes.addressof(_HUGE), data=4096),
            r"a byte count that fits 63 bits, got \[1099511627776,",
        ),
        "far apart": (
            _capsule(ndim=3, shape=shape, strides=ctypes.addressof(_FAR), data=4096),
            r"offsets that fit 63 bits, got \[4611686018427387904,",
        ),
        "no capsule": (7, "a DLPack capsule from __dlpack__.., got int"),
        "value": (ValueError("no"), "a tensor that can be shared, got no"),
        "type": (TypeError("no"), "a tensor that can be shared, got no"),
        "no Unicode": (RuntimeError("\udcff"), r"a tensor that can be shared, got \\udcff"),
    }


@pytest.mark.parametrize("case", _capsules())
def test_capsules_that_describe_no_tensor_are_refused(case):
    q, kv, indices, _ = problems.sparse_mla()
    capsule, text = _capsules()[case]
    refusal = f"^sparse_mla::forward: q: ((shape|strides): )?want {text}"
    with pytest.raises(winnow.Error, match=refusal) as caught:
        sparse_mla.forward(Foreign(q, capsule), kv, indices)
    assert caught.value.argument == "q"


@pytest.mark.parametrize("error", [AttributeError("none here"), RuntimeError("broken")])
def test_inputs_whose_module_makes_no_tensors_want_an_out(error):
    """Their own __array_namespace__ fails; with out= nothing is to be made."""
    q, kv, indices, _ = problems.sparse_mla()

    class Producer(Foreign):
        def __array_namespace__(self):
            raise error

    wanted = f"out: want a tensor to write into, or inputs whose module has .*, got .*{error}"
    with pytest.raises(winnow.InvalidArgument, match=wanted):
        sparse_mla.forward(Producer(q), kv, indices)
    out = (np.empty((3, 4, 512), np.float32), *(np.empty((3, 4), np.float32) for _ in range(2)))
    sparse_mla.forward(Producer(q), kv, indices, out=out)
    assert np.array_equal(out[0], sparse_mla.forward(q, kv, indices)[0])


@pytest.mark.parametrize("device", [(), (1,), (1, 0, 0), ("cpu", 0), [1, 0], 5, ValueError("no")])
def test_devices_that_are_no_pair_of_numbers_are_refused(device):
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(
        winnow.Error, match="q: want a tensor (whose __dlpack_device__|that can be)"
    ):
        sparse_mla.forward(Foreign(q, device=device), kv, indices)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
@pytest.mark.parametrize("where", ["capsule", "device"])
def test_what_ends_the_program_passes_through(error, where):
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(error):
        sparse_mla.forward(Foreign(q, **{where: error()}), kv, indices)


@pytest.mark.parametrize("backend", [3, 1.5, b"cpu", ["cpu"]])
def test_a_backend_is_a_name(backend):
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(winnow.Error, match="backend: want None or the name of a backend, got"):
        sparse_mla.forward(q, kv, indices, backend=backend)


def test_texts_that_are_no_unicode_are_shown_escaped():
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(winnow.Error, match=r"got .*\\udcff"):
        sparse_mla.forward(q, kv, indices, backend="\udcff")
    with pytest.raises(winnow.Error, match=r"stream: want .*\\udcff"):
        sparse_mla.forward(q, kv, indices, stream="\udcff")
    with pytest.raises(winnow.Error, match=r"dtype: want .*\\udcff"):
        winnow.supports("sparse_mla.forward", dtype="\udcff", device="cpu")
    with pytest.raises(winnow.Error, match=r"device: want .*\\udcff"):
        winnow.supports("sparse_mla.forward", dtype="f32", device="\udcff")


class _Store:
    def __init__(self, value, there=True):
        self._value, self._there = value, there

    def set(self, key, value):
        pass

    def get(self, key):
        return given(self._value, None)

    def check(self, keys):
        return given(self._there, None)


@pytest.mark.parametrize(
    "store, text",
    [
        (_Store(7), "get.. gave int, not bytes or a text"),
        (_Store(RuntimeError("\udcff")), r"cannot .*: \\udcff"),
        (_Store(b"", there=ValueError("no")), "cannot .*: no"),
        (_Store("\udcff"), "expert_parallel"),
    ],
)
def test_stores_that_misbehave_are_errors(store, text):
    with pytest.raises(winnow.Error, match=text):
        winnow.expert_parallel.create_shared_memory(store, 1, 2, timeout=0.5)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_store_may_end_the_program(error):
    with pytest.raises(error):
        winnow.expert_parallel.create_shared_memory(_Store(error()), 1, 2, timeout=5)


def _negated(array):
    """A view of torch with the negative bit whose values are those of the array."""
    values = torch.from_numpy(np.ascontiguousarray(array))
    view = torch._neg_view(-values)
    assert view.is_neg() and torch.equal(view, values)
    return view


def test_pending_negations_are_refused_as_inputs_and_outputs():
    q, kv, indices, _ = problems.sparse_mla()
    tensors = [torch.from_numpy(a) for a in (q, kv, indices)]
    with pytest.raises(winnow.Error, match=r"q: want .* resolve_neg\(\) gives its values"):
        sparse_mla.forward(_negated(q), *tensors[1:])
    out = _negated(np.zeros((3, 4, 512), np.float32))
    with pytest.raises(winnow.Error, match=r"out: want .* resolve_neg\(\)"):
        sparse_mla.forward(*tensors, out=out)
    got = sparse_mla.forward(_negated(q).resolve_neg(), *tensors[1:])[0]
    torch.testing.assert_close(got, sparse_mla.forward(*tensors)[0], rtol=0, atol=0)


def test_operators_see_the_values_of_pending_negations():
    q, kv, indices, _ = problems.sparse_mla()
    tensors = [torch.from_numpy(a) for a in (q, kv, indices)]
    want = winnow.torch.sparse_mla_attention(*tensors)
    got = winnow.torch.sparse_mla_attention(_negated(q), *tensors[1:])
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_arrays_with_a_mask_are_refused():
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(winnow.Error, match=r"q: want an array without a mask, .* filled\(\)"):
        sparse_mla.forward(np.ma.masked_array(q, mask=q > 0), kv, indices)


def test_tensors_without_memory_are_refused():
    q, kv, indices, _ = problems.sparse_mla()
    tensors = [torch.from_numpy(a) for a in (q, kv, indices)]
    freed = tensors[0].clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(winnow.Error, match="q: want a tensor in memory, got .*Tensor without any"):
        sparse_mla.forward(freed, *tensors[1:])
    for transform in (torch.func.functionalize, torch.vmap):
        with pytest.raises(
            winnow.Error, match="^sparse_mla::forward: q: want a .*tensor in memory"
        ):
            transform(lambda x: sparse_mla.forward(x, *tensors[1:])[0])(tensors[0])
