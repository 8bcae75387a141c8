"""What comes in and goes out: kinds, dtypes, streams; refusals by their text."""

import copy
import pickle
import sys

import every_operation
import numpy as np
import problems
import pytest
import torch
from foreign import Foreign

import winnow
from winnow import sparse_mla


def _frozen(array):
    array = array.copy()
    array.flags.writeable = False
    return array


def _refusals():
    q, kv, indices, _ = problems.sparse_mla()
    out = np.zeros((3, 4, 512), np.float32)
    t = torch.from_numpy
    zero_stride = np.lib.stride_tricks.as_strided(out, out.shape, (0, *out.strides[1:]))
    return {
        "float64": ((q.astype(float), kv, indices), {}, "kv: want dtype f64, got f32"),
        "longdouble": ((q.astype("g"), kv, indices), {}, "q: want dtype .*f64.*, got float128"),
        "torch.float64": ((t(q).double(), t(kv), t(indices)), {}, "kv: want dtype f64, got f32"),
        "mixed dtypes": ((q, kv.astype(np.float16), indices), {}, "kv: want dtype f32, got f16"),
        "not a tensor": (([1.0], kv, indices), {}, "q: want a tensor .* got list"),
        "none": ((None, kv, indices), {}, r"q: want a tensor \[s_q, h_q, d_qk\], got none"),
        "rank": ((q[0], kv, indices), {}, "q: want 3 dimensions"),
        "too many dims": (
            (q.reshape(1, 1, 1, 1, 3, 4, 576), kv, indices),
            {},
            "q: .* 6 dimensions",
        ),
        "shape": ((q, kv[:, :, :512], indices), {}, "kv: want shape"),
        "d_qk": ((q[:, :, :100], kv[:, :, :100], indices), {}, "d_qk = 576 or 512"),
        "last dim": ((q[:, :, ::-1], kv, indices), {}, "q: want stride 1 in the last dimension"),
        "odd bytes": ((_unaligned(q), kv, indices), {}, "q: want memory aligned to 4 bytes"),
        "k_stride": ((q, kv, indices), {"k_stride": 2}, "k_stride: want 1 where q_start is absent"),
        "scale": ((q, kv, indices), {"scale": float("nan")}, "scale: want a finite number"),
        "out shape": ((q, kv, indices), {"out": out[:2]}, "out: want shape"),
        "out dtype": ((q, kv, indices), {"out": out.astype(np.float16)}, "out: want dtype f32"),
        "out read-only": ((q, kv, indices), {"out": _frozen(out)}, "out: .* got a read-only one"),
        "out shares": ((q, kv, indices), {"out": zero_stride}, "do not share memory"),
        "out tuple": ((q, kv, indices), {"out": (out, None)}, "out: want .* tuple of 3, got .* 2"),
        "meta": ((t(q).to("meta"), t(kv), t(indices)), {}, "q: want a dense tensor in memory"),
        "sparse": ((t(q).to_sparse(), t(kv), t(indices)), {}, "q: want a dense tensor in memory"),
        "gradient": ((t(q).requires_grad_(), t(kv), t(indices)), {}, "q: .* requires no gradient"),
        "stream": (
            (q, kv, indices),
            {"stream": "now"},
            "stream: want None, a handle, .* got 'now'",
        ),
        "negative stream": ((q, kv, indices), {"stream": -1}, "stream: .* got -1"),
    }


def _unaligned(array):
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view = memory[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("case", _refusals())
def test_refusals_name_the_argument_and_change_nothing(case):
    arguments, options, text = _refusals()[case]
    before = {k: np.copy(v) for k, v in options.items() if isinstance(v, np.ndarray)}
    with pytest.raises(ValueError, match=text) as caught:
        sparse_mla.forward(*arguments, **options)
    assert isinstance(caught.value, winnow.Error)
    assert caught.value.operation == "sparse_mla::forward"
    assert text.startswith(caught.value.argument) or caught.value.argument in str(caught.value)
    assert caught.value.code == "invalid_argument"
    assert "\n" not in str(caught.value)
    for name, value in before.items():
        np.testing.assert_array_equal(options[name], value)
    q, kv, indices, _ = problems.sparse_mla()
    sparse_mla.forward(q, kv, indices)  # the next call works


def test_without_gradient_mode_the_values_are_taken():
    q, kv, indices, _ = problems.sparse_mla()
    q, kv, indices = (torch.from_numpy(a) for a in (q, kv, indices))
    with torch.no_grad():
        out = sparse_mla.forward(q.requires_grad_(), kv, indices)[0]
    assert not out.requires_grad


@pytest.mark.parametrize("name", sorted(every_operation.ALL))
def test_results_are_where_the_inputs_are_whatever_the_default_device(name):
    operation = every_operation.ALL[name]
    tensors = {n: torch.from_numpy(value) for n, value in operation.tensors.items()}
    caches = {"cache", "key_cache", "value_cache", "pages", "state"}  # which are written in place
    tensors.update(dict.fromkeys(set(operation.outputs) - caches))
    torch.set_default_device("meta")
    try:
        results = operation.call(**tensors)
    finally:
        torch.set_default_device(None)
    made = results if isinstance(results, tuple) else (results,)
    assert {one.device.type for one in made if isinstance(one, torch.Tensor)} <= {"cpu"}


@pytest.mark.parametrize("old", [False, True])
def test_any_dlpack_tensor_comes_in_and_goes_out(old):
    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)
    arguments = [Foreign(a, old=old) for a in (q, kv, indices)]
    for got, expected in zip(sparse_mla.forward(*arguments), want, strict=True):
        assert isinstance(got, Foreign)
        np.testing.assert_array_equal(got.array, expected)
    out = Foreign(np.full_like(want[0], np.nan))
    assert sparse_mla.forward(*arguments, out=out)[0] is out
    np.testing.assert_array_equal(out.array, want[0])


def test_a_read_only_dlpack_tensor_is_not_written():
    q, kv, indices, _ = problems.sparse_mla()
    out = Foreign(_frozen(np.zeros((3, 4, 512), np.float32)))
    with pytest.raises(ValueError, match="out: .* got a read-only one"):
        sparse_mla.forward(q, kv, indices, out=out)


def test_elements_without_bytes_are_refused():
    q, kv, indices, _ = problems.sparse_mla()
    with pytest.raises(ValueError, match="kv: want elements of at least a byte, got .V0") as e:
        winnow.sparse_mla.forward(q, np.zeros(kv.shape, "V0"), indices)
    assert e.value.argument == "kv"


def test_read_only_inputs_are_fine():
    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)[0]
    got = sparse_mla.forward(_frozen(q), _frozen(kv), _frozen(indices))[0]
    np.testing.assert_array_equal(got, want)


def test_streams_are_accepted_for_cpu_tensors():
    class CudaStream:
        def __cuda_stream__(self):
            return (0, 7)

    class TorchStream:
        cuda_stream = 7

    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)[0]
    for stream in (None, 0, 7, CudaStream(), TorchStream()):
        np.testing.assert_array_equal(sparse_mla.forward(q, kv, indices, stream=stream)[0], want)


def test_parameters_and_subclasses_of_tensors_come_in():
    q, kv, indices, _ = problems.sparse_mla()
    want = sparse_mla.forward(q, kv, indices)[0]
    parameter = torch.nn.Parameter(torch.from_numpy(q))
    with torch.no_grad():
        got = sparse_mla.forward(parameter, torch.from_numpy(kv), torch.from_numpy(indices))[0]
    assert type(got) is torch.Tensor
    np.testing.assert_array_equal(got.numpy(), want)
    viewed = np.asarray(q).view(np.ndarray)
    np.testing.assert_array_equal(sparse_mla.forward(viewed, kv, indices)[0], want)


def test_references_are_given_back():
    q, kv, indices, _ = problems.sparse_mla()
    before = [sys.getrefcount(a) for a in (q, kv, indices)]
    for _ in range(50):
        sparse_mla.forward(q, kv, indices)
        with pytest.raises(ValueError):
            sparse_mla.forward(q, kv, indices, k_stride=0)
    assert [sys.getrefcount(a) for a in (q, kv, indices)] == before
    q.resize((3, 4, 576), refcheck=False)  # no buffer is still exported


def test_errors_survive_pickling():
    with pytest.raises(winnow.Error) as caught:
        winnow.set_num_threads(-1)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.code == "invalid_argument"


def test_functions_are_copied_and_pickled_by_name():
    for function in (winnow.sparse_mla.forward, winnow.expert_parallel.layout):
        assert copy.deepcopy({"attend": function})["attend"] is function
        assert pickle.loads(pickle.dumps(function)) is function


def test_supports_answers_and_gives_reasons():
    assert winnow.supports("sparse_mla.forward", h_q=128, topk=2048)
    assert winnow.supports("sparse_mla::backward", dtype=torch.bfloat16).backend == "cpu"
    for op in (
        "sparse_mla.distribution",
        "paged_xl.attention",
        "paged_xl.attention_fused",
        "paged_xl.append",
        "paged_xl.position_term",
    ):
        assert winnow.supports(op, dtype=np.float16), op
    answer = winnow.supports("paged_xl.attention", head_size=33)
    assert not answer
    assert "head_size" in answer.reason
    answer = winnow.supports("sparse_mla.forward", backend="cuda")
    assert not answer and "cuda" in answer.reason
    assert not winnow.supports("sparse_mla.forward", dtype="float8_e4m3fn")
    # Shapes that nobody has the memory for: nothing is made and nothing runs.
    assert winnow.supports("sparse_mla.backward", s_q=2**22, h_q=128, s_kv=2**31 - 1, topk=2**20)
    assert winnow.supports("paged_xl.attention", num_seqs=2**20, num_blocks=2**31)
    answer = winnow.supports("sparse_mla.distribution", s_kv=2**31)
    assert "want at most 2^31 - 1 rows" in answer.reason
    with pytest.raises(TypeError, match="unknown size 'heads'"):
        winnow.supports("sparse_mla.forward", heads=3)
    with pytest.raises(ValueError, match="device: want cpu, cuda or cuda:INDEX, got tpu"):
        winnow.supports("sparse_mla.forward", device="tpu")
