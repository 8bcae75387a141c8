"""What type checkers say about code that uses the package."""

import ast
from pathlib import Path

import pytest
from processes import python

import winnow

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(winnow.__file__).parent

# Each reveal_type() stands before the comment that it must give.
_PROGRAM = """
import numpy as np
import numpy.typing as npt
import torch
from typing import Optional
from torch import Tensor

import winnow
from winnow import expert_parallel, indexer, paged_xl, sparse_mla
from winnow.torch import (
    paged_xl_attention, paged_xl_attention_fused, sparse_mla_attention, sparse_mla_backward,
    sparse_mla_decode, sparse_mla_distribution, sparse_mla_store, indexer_topk_paged,
    indexer_scores_paged,
)

version: str = winnow.__version__
reveal_type(winnow.__version__)  # str


def of_torch(q: Tensor, kv: Tensor, i: Tensor, wanted: bool, sink: Optional[Tensor]) -> Tensor:
    total = sparse_mla_attention(q, kv, i).sum()
    out, lse = sparse_mla_attention(q, kv, i, return_lse=True)
    reveal_type(sparse_mla_attention(q, kv, i, return_lse=False))  # Tensor
    either = sparse_mla_attention(q, kv, i, return_lse=wanted)
    if not isinstance(either, tuple):
        total += either.sum()
    total += sparse_mla_distribution(q, kv, i, lse).sum()
    dq, dkv = sparse_mla_backward(q, kv, i, out, lse, out)
    total += dkv.sum() + sparse_mla_backward(q, kv, i, out, lse, out, attn_sink=lse)[2].sum()
    gradients = sparse_mla_backward(q, kv, i, out, lse, out, attn_sink=sink)
    total += gradients[0].sum()
    step = (q, kv, kv, q, q)
    total += paged_xl_attention(*step, None, i, i).sum()
    out, lse = paged_xl_attention(*step, None, i, i, return_lse=True)
    total += paged_xl_attention_fused(*step, q, None, i, i).sum()
    _, lse = paged_xl_attention_fused(*step, q, None, i, i, return_lse=True)
    sparse_mla_store(kv, kv, i, format="bf16")
    out, lse = sparse_mla_decode(q, kv, i, topk_length=i)
    chosen, length = indexer_topk_paged(q, kv, q, i, i, 8)
    chosen, length, scores = indexer_topk_paged(q, kv, q, i, i, 8, return_scores=True)
    total += scores.sum() + indexer_scores_paged(q, kv, q, i, i, 8, clean=False).sum()
    return total + lse.sum()


def of_arrays(q: npt.NDArray[np.float32], i: npt.NDArray[np.int32], wanted: bool) -> float:
    out, max_logits, lse = sparse_mla.forward(q, q, i)
    dq, dkv = sparse_mla.backward(q, q, i, out, lse, out)
    dq, dkv, d_sink = sparse_mla.backward(q, q, i, out, lse, out, attn_sink=q)
    chosen, length = indexer.topk(q, q, q, 8)
    chosen, length, scores = indexer.topk(q, q, q, 8, return_scores=True)
    rows, scale = indexer.quantize(q)
    slots, count = indexer.topk_paged(q, q, q, i, i, 8)
    slots, count, best = indexer.topk_paged(q, q, q, i, i, 8, return_scores=True)
    sparse_mla.store(q, q, i)
    step, lse_of_step = sparse_mla.decode(q, q, i)
    total = paged_xl.attention(q, q, q, q, q, None, i, i).sum()
    out, lse = paged_xl.attention_fused(q, q, q, q, q, q, None, i, i, return_lse=True)
    paged_xl.attention(q, q, q, q, q, 0.1, i, i, return_lse=wanted)
    return float(total + out.sum() + d_sink.sum() + scores.sum())


def of_experts(x: Tensor, i: Tensor) -> Tensor:
    world = expert_parallel.InProcessWorld(1)
    layer = expert_parallel.AllToAll(
        world.transport(0), world.store(), max_tokens=1, hidden=8, topk=1, experts=1
    )
    got: expert_parallel.Dispatched = layer.dispatch(x, i)
    reveal_type(layer.dispatch(x, i).output)  # Tensor
    reveal_type(layer.dispatch(x, i).weights)  # Optional Tensor
    notifier = expert_parallel.Notifier(world.transport(0), world.store(), experts=1)
    reveal_type(notifier.notify(i, i, i, i).num_recv_tokens)  # Tensor
    return layer.combine(layer.dispatch(x, i).output, got.descriptor).sum()
"""
_TYPES = ["str", "Tensor", "Tensor", "Tensor | None", "Tensor"]


def test_typed_programs_pass_a_strict_checker(tmp_path):
    (tmp_path / "program.py").write_text(_PROGRAM)
    (tmp_path / "mistake.py").write_text(
        "import torch\nfrom winnow.torch import sparse_mla_attention\n"
        "t = torch.zeros(1)\nsparse_mla_attention(t, t, t, return_lse=True).sum()\n"
    )
    # torch takes the checker 20 seconds where it has not seen it yet.
    cache = ROOT / "build" / "mypy"
    mypy = "-m", "mypy", "--strict", "--cache-dir", cache, "program.py", "mistake.py"
    result = python(*mypy, cwd=tmp_path, timeout=900)
    lines = result.stdout.splitlines()
    errors = [line for line in lines if "error:" in line]
    assert len(errors) == 1 and errors[0].startswith("mistake.py:4: error: "), result.stdout
    assert '"tuple[Tensor, Tensor]" has no attribute "sum"' in errors[0]
    types = [
        line.split('"')[1].replace("torch._tensor.", "") for line in lines if "Revealed" in line
    ]
    assert types == _TYPES, result.stdout


def _names(function):
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


@pytest.mark.parametrize("room", ["sparse_mla", "indexer", "compressor", "paged_xl"])
def test_overloads_have_the_parameters_of_their_functions(room):
    stub = ast.parse((PACKAGE / "_winnow" / f"{room}.pyi").read_text())
    typed = {}
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            typed.setdefault(node.name, []).append(_names(node))
    module = getattr(winnow, room)
    assert set(typed) == set(module.__all__)
    for name, overloads in typed.items():
        signature = getattr(module, name).__doc__.splitlines()[0]
        declared = _names(ast.parse(f"def {signature}: ...").body[0])
        assert all(names == declared for names in overloads), name
    overloaded = {"sparse_mla": 2, "indexer": 3, "compressor": 3, "paged_xl": 2}[room]
    assert sum(len(overloads) == 3 for overloads in typed.values()) == overloaded
