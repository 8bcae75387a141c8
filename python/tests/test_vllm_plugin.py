"""The plugin of vLLM, on a small package that has the names and nothing of vLLM."""

import re
from pathlib import Path

import pytest
from processes import forked

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "__init__.py": '__version__ = "{version}"\n',
    "platforms.py": """
class _Platform:
    family = 90

    def is_device_capability_family(self, family):
        return family == self.family


current_platform = _Platform()
""",
    "third_party/flashmla/flash_mla_interface.py": 'raise ImportError("no extension")\n',
    "third_party/__init__.py": "",
    "third_party/flashmla/__init__.py": "",
    "v1/attention/ops/flashmla.py": """
def _absent(*args, **kwargs):
    raise RuntimeError("no extension")


class FlashMLASchedMeta:
    pass


flash_mla_with_kvcache = flash_mla_sparse_fwd = get_mla_metadata = _absent
flash_attn_varlen_func = flash_attn_varlen_kvpacked_func = _absent
flash_mla_with_kvcache_fp8 = get_mla_metadata_dense_fp8 = _absent
flash_attn_varlen_qkvpacked_func = _absent


def is_flashmla_dense_supported():
    return False, "no extension"


def is_flashmla_sparse_supported():
    return False, "no extension"
""",
    "v1/attention/backend.py": """
from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd, is_flashmla_sparse_supported
from vllm.v1.attention.ops.flashmla import get_mla_metadata as plan


def attend(q, kv, indices, out):
    return flash_mla_sparse_fwd(q, kv, indices, 0.1, out=out)
""",
}
PROGRAM = """
import logging, sys
from importlib.metadata import EntryPoint

logging.basicConfig(level=logging.INFO)
{before}
plugin = EntryPoint("winnow", "{value}", "vllm.general_plugins").load()
plugin(), plugin()
{after}
"""
# A model's module that is imported before or after the plugin.
IMPORT = "from vllm.v1.attention import backend"
USE = """
import torch
import winnow
from vllm.platforms import current_platform
from vllm.third_party.flashmla.flash_mla_interface import flash_mla_with_kvcache
from vllm.v1.attention.ops import flashmla

q, kv = torch.randn(3, 4, 576), torch.randn(9, 1, 576)
indices = torch.tensor([[[1, 2]], [[3, -1]], [[8, 0]]], dtype=torch.int32)
out = torch.empty(3, 4, 512)
got = backend.attend(q, kv, indices, out)
assert got[0] is out
assert torch.equal(out, winnow.sparse_mla.forward(q, kv, indices, scale=0.1)[0])
assert flash_mla_with_kvcache is flashmla.flash_mla_with_kvcache
assert flashmla.flash_attn_varlen_func is flashmla._absent  # stays vLLM's
assert isinstance(flashmla.get_mla_metadata()[0], flashmla.FlashMLASchedMeta)
assert backend.is_flashmla_sparse_supported() == (True, None)
assert flashmla.is_flashmla_dense_supported() == (True, None)

# Dense decode in 8 bits, as vLLM's attention of plain MLA calls it.
lens, table = torch.tensor([40, 9]).int(), torch.tensor([[3, 0, 1], [2, 5, 5]]).int()
plan, splits = flashmla.get_mla_metadata_dense_fp8(lens, 8, 1)
assert plan.shape == (1, 8) and splits.shape == (3,)
q = torch.randn(2, 2, 4, 576).to(torch.float8_e4m3fn)
cache = torch.randn(6, 16, 1, 576).to(torch.float8_e4m3fn)
scales = torch.full((1,), 0.5), torch.full((1,), 2.0)
out, lse = flashmla.flash_mla_with_kvcache_fp8(
    q=q, k_cache=cache, block_table=table, cache_seqlens=lens, head_dim_v=512,
    tile_scheduler_metadata=plan, num_splits=splits, softmax_scale=0.1, causal=True,
    descale_q=scales[0], descale_k=scales[1],
)
want = winnow.sparse_mla.decode(
    q.bfloat16(), cache, format="fp8_576", scale=0.1, block_tables=table, context_lens=lens,
    q_scale=scales[0], kv_scale=scales[1],
)
assert torch.equal(out, want[0]) and torch.equal(lse, want[1].mT)
current_platform.family = 100
assert "Hopper" in backend.is_flashmla_sparse_supported()[1]
"""


def value():
    """That of the entry point in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'entry-points\."vllm.general_plugins"\]\nwinnow = "([\w.:]+)"', text)[1]


def start(folder, before="", after="", version="0.33.0", winnow_vllm="1", without=""):
    for name, text in FILES.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{version}", version).replace(without or "\0", "_other"))
    program = PROGRAM.format(value=value(), before=before, after=after)
    return forked("-c", program, path=[folder], add={"WINNOW_VLLM": winnow_vllm})


@pytest.mark.parametrize("early", [True, False], ids=["imported-before", "imported-after"])
def test_it_stands_behind_the_copy(tmp_path, early):
    after = USE if early else IMPORT + USE
    result = start(tmp_path, IMPORT if early else "", after, version="0.33.0+cu129")
    assert result.returncode == 0, result.stderr
    assert "stands behind vllm.v1.attention.ops.flashmla of vLLM 0.33.0+cu129" in result.stderr


@pytest.mark.parametrize("setting", ["", "0"])
def test_it_does_nothing_unasked(tmp_path, setting):
    after = "assert not any(name.split('.')[0] == 'vllm' for name in sys.modules)"
    result = start(tmp_path, after=after, version="9.9.9", winnow_vllm=setting)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_another_version_is_refused(tmp_path):
    result = start(tmp_path, version="0.34.0")
    want = "winnow.compat.vllm_plugin: vllm: want 0.33.0, or no WINNOW_VLLM=1, got 0.34.0"
    assert result.returncode == 1 and want in result.stderr


def test_a_missing_name_is_refused(tmp_path):
    result = start(tmp_path, without="get_mla_metadata")
    assert result.returncode == 1
    assert "want a module with get_mla_metadata, got 0.33.0" in result.stderr


COPY = """
class FlashMLASchedMeta:
    pass


def flash_mla_with_kvcache():
    return "vLLM's"


flash_mla_sparse_fwd = get_mla_metadata = flash_attn_varlen_func = flash_mla_with_kvcache
"""
DOOR = """
from vllm.third_party.flashmla.flash_mla_interface import (
    FlashMLASchedMeta, flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache,
    get_mla_metadata,
)


def is_flashmla_dense_supported():
    return True, None


def flash_mla_with_kvcache_fp8():
    raise RuntimeError("no extension")


get_mla_metadata_dense_fp8 = flash_mla_with_kvcache_fp8
is_flashmla_sparse_supported = is_flashmla_dense_supported
"""
USE_OF_COPY = """
from vllm.third_party.flashmla import flash_mla_interface
from vllm.v1.attention.ops import flashmla

for module in (flash_mla_interface, flashmla):
    assert module.flash_mla_with_kvcache.__module__ == "winnow.compat.flash_mla"
    assert module.flash_attn_varlen_func() == "vLLM's"
"""


def test_what_winnow_does_not_have_stays_in_the_copy(tmp_path, monkeypatch):
    monkeypatch.setitem(FILES, "third_party/flashmla/flash_mla_interface.py", COPY)
    monkeypatch.setitem(FILES, "v1/attention/ops/flashmla.py", DOOR)
    result = start(tmp_path, after=USE_OF_COPY)
    assert result.returncode == 0, result.stderr
