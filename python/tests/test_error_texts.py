"""Errors that a mistaken call gives: dtypes, 64-bit indices, keywords, arguments of other types."""

import ast
import re

import every_operation
import numpy as np
import pytest
import torch
import winnow.torch as ops

import winnow
from winnow import _winnow, expert_parallel, indexer, sparse_mla

_TENSORS = every_operation.ALL["sparse_mla::forward"].tensors
INPUTS = [_TENSORS[name] for name in ("q", "kv", "indices")]


def _text(operation, argument, array):
    tensors = {**operation.tensors, argument: array}
    with pytest.raises(ValueError) as caught:
        operation.call(**tensors)
    return str(caught.value).replace("rank 0: ", "")  # what every rank of a collective call says


@pytest.mark.parametrize(("name", "argument"), every_operation.EVERY_TENSOR)
def test_a_refused_dtype_gets_those_that_the_operation_takes(name, argument):
    operation = every_operation.ALL[name]
    tensor, dtypes = operation.tensors[argument], operation.dtypes[argument]
    start = f"{name.split(',')[0]}: {argument}: want dtype {dtypes}"
    pattern = re.escape(start)
    for wrong in (np.complex64, np.int16):
        text = _text(operation, argument, tensor.astype(wrong))
        assert re.fullmatch(f"{pattern}, got {np.dtype(wrong)}", text), text
    text = _text(operation, argument, torch.from_numpy(tensor.astype(np.complex64)))
    assert re.fullmatch(f"{pattern}, got torch.complex64", text), text
    if dtypes == "i32":
        text = _text(operation, argument, torch.from_numpy(tensor).long())
        hint = ".int() converts a tensor of torch, .astype('int32') an array"
        assert text == f"{start}, got i64; {hint}"


def test_every_call_of_the_table_works():
    for operation in every_operation.ALL.values():
        operation.call(**operation.tensors)


def test_dtypes_that_numpy_cannot_share_are_named():
    q, kv, indices = INPUTS
    for dtype in ("datetime64[s]", ">f4", "object"):
        with pytest.raises(ValueError, match="kv: want dtype f32, got " + re.escape(dtype)):
            sparse_mla.forward(q, kv.astype(dtype), indices)


def test_more_foreign_dtypes_than_there_are_names_for():
    q, kv, indices = INPUTS
    for size in range(1, 200):
        with pytest.raises(ValueError, match=f"q: want dtype .*, got [|]S{size}$"):
            sparse_mla.forward(np.zeros(q.shape, f"S{size}"), kv, indices)
    with pytest.raises(ValueError, match="q: want dtype .*, got bool"):
        sparse_mla.forward(q > 0, kv, indices)


@pytest.mark.parametrize(
    ("message", "argument"),
    [
        ("x: want [n, 64], got [3, 32]", "x"),
        ("rank 1: x: want [n, 64], got [3, 32]", "x"),
        ("x: want a: b, got c: want d", "x"),
        (": want x, got y", ""),
        ("want x, got y", ""),
        ("rank 1: out of memory in the call", ""),
        ("", ""),
    ],
)
def test_the_argument_that_a_message_names(message, argument):
    assert _winnow.details_of(message)[0] == argument


def _functions():
    """Every public function and method of the extension that has parameters."""
    modules = [_winnow, *(getattr(_winnow, room) for room in ("sparse_mla", "indexer", "paged_xl"))]
    modules.append(_winnow.expert_parallel)
    for module in modules:
        for name, member in vars(module).items():
            kind = type(member).__name__
            if kind == "nb_func" and not name.startswith("_"):
                yield f"{module.__name__}.{name}", member
            if isinstance(member, type):
                for method, function in vars(member).items():
                    if type(function).__name__ == "nb_method" and method in ("__init__",):
                        yield f"{module.__name__}.{name}", member
    world = expert_parallel.InProcessWorld(1)
    transport = world.transport(0)
    sizes = {"max_tokens": 1, "hidden": 16, "topk": 1, "experts": 1, "dtype": "float32"}
    layer = expert_parallel.AllToAll(transport, world.store(), **sizes)
    notifier = expert_parallel.Notifier(transport, world.store(), experts=1)
    for thing in (world, transport, layer, notifier):
        for name in dir(thing):
            member = getattr(thing, name)
            if type(member).__name__ == "nb_bound_method" and not name.startswith("_"):
                yield f"{type(thing).__name__}.{name}", member


def _parameters(function, by_keyword_only=False):
    """The names of all parameters, or of those that no argument reaches by its place."""
    documented = getattr(function, "__init__", function) if isinstance(function, type) else function
    arguments = ast.parse(f"def {documented.__doc__.splitlines()[0]}: ...").body[0].args
    by_place = [] if by_keyword_only else [a.arg for a in arguments.args if a.arg != "self"]
    return by_place + [a.arg for a in arguments.kwonlyargs]


# Without parameters, or for the package itself.
_BARE = {"backends", "num_threads", "nvshmem_obstacle", "launch_environment", "default_timeout",
         "supports", "details_of", "close", "store", "MemoryStore"}  # fmt: skip


def test_an_unknown_keyword_is_named_with_the_nearest():
    tried = []
    for name, function in _functions():
        bare = name.split(".")[-1]
        if bare in _BARE:
            continue
        parameters = _parameters(function)
        assert parameters, name
        for wrong, near in ((parameters[-1] + "s", parameters[-1]), ("zzzzzz", None)):
            with pytest.raises(TypeError) as caught:
                function(**{wrong: None})
            text = str(caught.value)
            assert text.startswith(f"{bare}() got an unexpected keyword argument '{wrong}'; "), text
            if near is None:
                assert text.endswith("it takes " + ", ".join(parameters)), text
            else:
                assert "; did you mean '" in text, text
        tried.append(bare)
    assert len(tried) >= 28, tried


def test_positional_arguments_that_are_too_many_are_counted():
    tried = []
    for name, function in _functions():
        bare = name.split(".")[-1]
        if bare in _BARE - {"num_threads", "backends"}:
            continue
        more = _parameters(function, by_keyword_only=True)
        most = len(_parameters(function)) - len(more)
        with pytest.raises(TypeError) as caught:
            function(*[None] * (most + 2))
        plural = "" if most == 1 else "s"
        text = f"{bare}() takes at most {most} positional argument{plural}, got {most + 2}"
        if more:
            text += f"; others go by keyword, such as '{more[0]}'"
        assert str(caught.value) == text, name
        tried.append(bare)
    assert len(tried) >= 30, tried


def test_what_may_have_been_meant_is_no_part_of_what_was_given():
    with pytest.raises(ValueError) as caught:
        winnow.supports("sparse_mla.foward")
    assert str(caught.value).endswith("; did you mean sparse_mla.forward?")
    assert caught.value.got == "sparse_mla.foward"
    assert winnow.supports("indexer.quantize", backend="sm90").reason.endswith(
        "(cuda, cpu), got sm90; did you mean cuda?"
    )


def test_a_backend_that_there_is_not_is_refused_by_the_operation():
    wanted = 'backend: want one of sm100, sm90, cuda, cpu, got "foo"'
    with pytest.raises(ValueError, match=f"^sparse_mla::forward: {wanted}$"):
        sparse_mla.forward(*INPUTS, backend="foo")
    with pytest.raises(ValueError, match=f"^supports: {wanted}$"):
        winnow.supports("sparse_mla.forward", backend="foo")


def test_texts_that_no_encoding_has_and_names_that_are_none_are_refused():
    with pytest.raises(TypeError, match=r"unexpected keyword argument '\\udc80'; it takes q"):
        sparse_mla.forward(**{"\udc80": 1})
    for op, got in (
        ("\udc80", r"\\udc80"), (3, "3"), (None, "None"), ("matmul", "matmul"),
        ("decode", r"decode; did you mean sparse_mla\.decode\?"),
        ("indexer::tokp", r"indexer\.tokp; did you mean indexer\.topk\?"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^supports: op: want one of .*, got {got}$"):
            winnow.supports(op)
    with pytest.raises(ValueError, match="^supports: backend: want None or the name .*, got 3"):
        winnow.supports("sparse_mla.forward", backend=3)


def test_missing_and_mistyped_arguments_are_named():
    q, kv, indices = INPUTS
    cases = [
        (lambda: sparse_mla.forward(q, kv), "forward() misses the argument 'indices'"),
        (
            lambda: sparse_mla.forward(q, kv, indices, scale="big"),
            "forward(): scale: want a number or None, got str",
        ),
        (
            lambda: sparse_mla.forward(q, kv, indices, k_stride=None),
            "forward(): k_stride: want an integer of 64 bits, got NoneType",
        ),
        (
            lambda: winnow.set_num_threads("3"),
            "set_num_threads(): count: want an integer of 32 bits, got str",
        ),
        (
            lambda: expert_parallel.AllToAll(None, None, max_tokens=1, hidden=1, topk=1, experts=1),
            "AllToAll(): transport: want a Transport, got NoneType",
        ),
        (
            lambda: expert_parallel.classic_clean_meta(3, bytes_per_token=1, recv_tokens=1),
            "classic_clean_meta(): route: want a string, got int",
        ),
    ]
    for call, text in cases:
        with pytest.raises(TypeError) as caught:
            call()
        assert str(caught.value) == text
    sparse_mla.forward(q, kv, indices, scale=1)  # an integer is a number


def test_integers_out_of_range_are_named_with_their_value():
    """They are of the right type: a ValueError with the number, of very long ones its length."""
    q, kv, indices = INPUTS
    scores = [torch.zeros(1, 2, 128), torch.zeros(3, 128), torch.zeros(1, 2)]
    of_32, of_64 = "want an integer of 32 bits, got", "want an integer of 64 bits, got"
    cases = [
        (lambda: winnow.set_num_threads(2**40), f"set_num_threads: count: {of_32} {2**40}"),
        (lambda: winnow.set_num_threads(-(2**80)), f"set_num_threads: count: {of_32} {-(2**80)}"),
        (lambda: indexer.topk(*scores, 2**63), f"topk: topk: {of_64} {2**63}"),
        (lambda: ops.indexer_topk(*scores, 2**63), f"indexer_topk: topk: {of_64} {2**63}"),
        (
            lambda: ops.indexer_topk(*scores, topk=10**5000),
            f"indexer_topk: topk: {of_64} one of 16610 bits",
        ),
        (
            lambda: sparse_mla.forward(q, kv, indices, scale=10**400),
            "forward: scale: want a number or None, got one of 1329 bits",
        ),
        (
            lambda: ops.sparse_mla_attention(
                *(torch.from_numpy(x) for x in (q, kv, indices)), scale=10**400
            ),
            "sparse_mla_attention: scale: want a number, got one of 1329 bits",
        ),
        (
            lambda: expert_parallel.InProcessWorld(2**40),
            f"InProcessWorld: world_size: {of_32} {2**40}",
        ),
    ]
    for call, text in cases:
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == text
        assert text.endswith(caught.value.got) and caught.value.argument in text
    reason = winnow.supports("indexer.topk", topk=10**5000).reason
    assert reason == f"supports: topk: {of_64} one of 16610 bits"


def test_supports_names_sizes_that_no_tensor_has():
    for op, size in (
        ("indexer.topk", "topk"),
        ("sparse_mla.forward", "s_q"),
        ("paged_xl.attention", "num_seqs"),
        ("expert_parallel.dispatch", "topk"),
    ):
        reason = winnow.supports(op, **{size: -1}).reason
        assert reason == f"supports: {size}: want 0 or more, got -1"
    reason = winnow.supports("sparse_mla.forward", s_q=2**62).reason
    assert reason == (f"supports: q: want a byte count that fits 63 bits, got [{2**62}, 64, 576]")
    reason = winnow.supports("expert_parallel.notify", channels=2**31).reason
    assert "channels: want at most 2^31 - 1, got 2147483648" in reason


def test_what_numpy_cannot_have_and_which_backend_serves_gpus():
    tensors = dict(every_operation.ALL["sparse_mla::decode"].tensors)
    q, cache, indices = (tensors[name] for name in ("q", "cache", "indices"))
    with pytest.raises(ValueError) as caught:
        sparse_mla.decode(q, cache, indices)
    assert str(caught.value) == (
        "sparse_mla::decode: numpy has no bfloat16, which the result has: pass tensors of torch"
    )
    q, kv, indices = INPUTS
    with pytest.raises(winnow.Error) as caught:
        sparse_mla.forward(q, kv, indices, backend="sm100")
    assert str(caught.value) == (
        "sparse_mla::forward: backend: want one that implements this operation (sm90, cuda, cpu), "
        "got sm100; did you mean sm90?"
    )
