"""torchtitan's own functions over deep_ep, unchanged, on CPU tensors: run by the ranks.

torchtitan registers its operators for CUDA alone: here the same functions are registered for the
CPU, too. Those of hybridep return an object, which torch 2.11 does not know of operators: there
torch.autograd.Function calls the same functions.
"""

import contextlib
import importlib

import deep_ep_clients as clients
import torch
from deep_ep_clients import E, H, K
from torch._library import opaque_object

_modules = {}
_OPERATORS_RETURN_OBJECTS = hasattr(opaque_object, "CustomClassBase")


class _Operator:
    """Stands in for torch.library.custom_op."""

    def __init__(self, name, **options):
        self._namespace, self._name = name.split("::")

    def __call__(self, function):
        self._call(function)
        self._function = function
        return self

    def _call(self, function):
        setattr(getattr(torch.ops, self._namespace), self._name, function)

    def register_fake(self, function):
        return function

    def register_autograd(self, backward, *, setup_context):
        parts = {"forward": self._function, "setup_context": setup_context, "backward": backward}
        parts = {name: staticmethod(part) for name, part in parts.items()}
        self._call(type(self._name, (torch.autograd.Function,), parts).apply)


@contextlib.contextmanager
def _operators_that_return_objects():
    if _OPERATORS_RETURN_OBJECTS:
        yield
        return
    opaque_object.CustomClassBase = opaque_object.OpaqueBase
    real, torch.library.custom_op = torch.library.custom_op, _Operator
    try:
        yield
    finally:
        torch.library.custom_op = real


def _module(name):
    if name not in _modules:
        from winnow import compat

        compat.install("deep_ep")
        with _operators_that_return_objects():
            module = importlib.import_module(f"torchtitan.distributed.deepep.{name}")
        if name == "deepep":
            torch.library.impl("deepep::dispatch", "cpu", module._dispatch_op_impl)
            torch.library.impl("deepep::combine", "cpu", module._combine_op_impl)
        elif _OPERATORS_RETURN_OBJECTS:
            for part in ("_dispatch", "_combine", "_dispatch_bwd", "_combine_bwd"):
                operator = getattr(module, f"{part}_impl")
                operator.register_kernel("cpu", operator._init_fn)
        _modules[name] = module
    # It keeps the buffer of the last group, and some ranks have been in another since.
    _modules[name]._buffer = None
    return _modules[name]


def _through_experts(rows, counts, first):
    """Expert e multiplies by e + 1; rows behind those that are counted have none."""
    experts = torch.arange(len(counts)).repeat_interleave(counts) + first + 1
    factors = torch.ones(len(rows)).index_copy(0, torch.arange(len(experts)), experts.float())
    return rows * factors[:, None].to(rows.dtype)


def deepep(group, dtype):
    """dispatch_tokens and combine_tokens over ElasticBuffer, in training and in inference."""
    titan = _module("deepep")
    rank, per = group.rank(), E // group.size()
    dtype = getattr(torch, dtype)
    x, idx, probs = clients.inputs(rank, dtype)
    probs[0] = 0  # a token of no expert
    want = clients.wanted(x, idx.masked_fill(probs == 0, -1), probs)
    most = 6 + group.size()
    titan.get_buffer(group, hidden=H, num_max_tokens_per_rank=2 * most, num_topk=K)

    def run(x, probs, **options):
        rows, counts, state = titan.dispatch_tokens(
            x, idx, probs, per, E, num_tokens_per_rank=most, **options
        )
        assert counts.shape == (per,) and counts.dtype == torch.int32
        out = titan.combine_tokens(_through_experts(rows, counts, rank * per), state)
        titan.sync_combine()
        return rows, out

    for _ in range(2):
        x.grad = probs.grad = None
        _, out = run(x.requires_grad_(), probs.requires_grad_())
        out.float().square().sum().backward()
        clients.compare((out, x.grad, probs.grad), want, dtype)
    with torch.no_grad():
        for cudagraphable in (False, True):
            rows, out = run(x, probs, cudagraphable=cudagraphable)
            assert not cudagraphable or len(rows) == most * group.size() * min(K, per)
            clients.compare([out], want[:1], dtype)
    assert not titan._handle_cache


def hybridep(group, dtype):
    """The same over HybridEPBuffer: with and without a wait for counts, and padded."""
    titan = _module("hybridep")
    rank, per = group.rank(), E // group.size()
    dtype = getattr(torch, dtype)
    # Without a wait torchtitan makes room for as many tokens of every rank as there are here.
    x, idx, probs = (part[:6] for part in clients.inputs(rank, dtype))
    want = clients.wanted(x, idx, probs)
    titan.get_buffer(group, H, 16, per)
    for capacity, pad in ((None, None), (None, 4), (1.0, None)):
        x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
        rows, counts, state = titan.dispatch_tokens(
            x, idx, probs, per, E, group,
            non_blocking_expert_capacity_factor=capacity, pad_multiple=pad,
        )  # fmt: skip
        assert counts.shape == (per,) and pad is None or not (counts % pad).any()
        out = titan.combine_tokens(_through_experts(rows, counts, rank * per), state, pad)
        out.float().square().sum().backward()
        clients.compare((out, x.grad, probs.grad), want, dtype)
