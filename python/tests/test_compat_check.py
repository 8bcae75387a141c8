"""python -m winnow.compat: which calls of a package are taken, and folders for PYTHONPATH."""

import inspect
import os
from pathlib import Path

import pytest
from processes import forked
from winnow.compat import _check, _values
from winnow.compat.__main__ import main

from winnow import compat


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def checked(folder, files):
    """The status and the reason of each "file:line name" in a package of these sources."""
    found = _check.check(written(folder, files))
    return {f"{f.path}:{f.line} {f.called.rpartition('.')[2]}": (f.status, f.reason) for f in found}


def statuses(found):
    return {where: status for where, (status, _) in found.items()}


def test_files_that_are_no_sources(tmp_path):
    """Links that lead nowhere or out of the folder, folders and pipes named as sources, files that
    cannot be read, and those that no parser takes."""
    folder, call = tmp_path / "package", "import flash_mla\nflash_mla.get_mla_metadata(x=1)\n"
    written(tmp_path, {"package/a.py": call, "elsewhere/b.py": call, "package/__init__.py": ""})
    (folder / "link.py").symlink_to(tmp_path / "elsewhere" / "b.py")
    (folder / "broken.py").symlink_to(tmp_path / "nowhere.py")
    (folder / "itself.py").symlink_to("itself.py")
    (folder / "folder.py").mkdir()
    os.mkfifo(folder / "pipe.py")
    (folder / "sum.py").write_text(f"import flash_mla\nx = {'-' * 200_000}1\n")
    assert [(f.path, f.line) for f in _check.check(folder)] == [
        ("a.py", 2), ("link.py", 2), ("sum.py", 1),
    ]  # fmt: skip


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    written(tmp_path, {"a.py": "import flash_mla\n"})
    monkeypatch.setattr(Path, "read_bytes", refuse)
    (found,) = _check.check(tmp_path, ["flash_mla"])
    assert str(found) == "a.py:1: flash_mla: not judged: it cannot be read: Permission denied"


# Ways to a function, each ending in a call that is not taken: its argument is of no such name.
WAYS = {
    "module": "import deep_gemm\ndeep_gemm.fp8_mqa_logits(x=1)\n",
    "alias": "import deep_gemm as dg\ndg.fp8_mqa_logits(x=1)\n",
    "from": "from deep_gemm import fp8_mqa_logits as f\nf(x=1)\n",
    "in a function": """
def g():
    import deep_gemm
    return deep_gemm.fp8_mqa_logits(x=1)
""",
    "global": """
f = None

def load():
    global f
    from deep_gemm import fp8_mqa_logits
    f = fp8_mqa_logits

def call():
    return f(x=1)
""",
    "getattr": """
import importlib

def load():
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return importlib.import_module("vllm.third_party.deep_gemm")

library = load()
f = getattr(library, "an_older_name", None) or getattr(library, "fp8_mqa_logits", None)
f(x=1)
""",
    "returned": """
def choose(plain):
    if plain:
        return print
    import deep_gemm
    return deep_gemm.fp8_mqa_logits

choose(False)(x=1)
""",
    "either": """
import deep_gemm
f = print if deep_gemm is None else deep_gemm.fp8_mqa_logits
f(x=1)
""",
    "given": """
import deep_gemm

class Runner:
    def __init__(self, f, *, g=None):
        self.f = f

    def run(self):
        inner(self.f)

def inner(f):
    f(x=1)

def outer(library):
    Runner(library.fp8_mqa_logits, g=None).run()

def load():
    return deep_gemm

outer(library=load())
""",
    "attribute": """
from deep_gemm import fp8_mqa_logits

class Base:
    def __init__(self):
        self.f = fp8_mqa_logits

class Layer(Base):
    def run(self):
        return self.f(x=1)
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_calls_are_found(tmp_path, way):
    found = _check.check(written(tmp_path, {"p/__init__.py": "", "p/a.py": WAYS[way]}))
    wrong = [f for f in found if f.called == "deep_gemm.fp8_mqa_logits"]
    assert [(f.status, f.reason) for f in wrong] == [("not taken", "there is no argument x")]
    assert "x=1" in WAYS[way].splitlines()[wrong[0].line - 1]


def test_names_are_followed_between_modules(tmp_path):
    files = {
        "p/__init__.py": "",
        "p/ops/__init__.py": "from .door import flash_mla_sparse_fwd\n",
        "p/ops/door.py": """
if True:
    from vllm.third_party.flashmla.flash_mla_interface import flash_mla_sparse_fwd
else:
    flash_mla_sparse_fwd = None
""",
        "p/models/a.py": """
from ..ops import flash_mla_sparse_fwd
from p.ops import door
import p.ops.door as other

flash_mla_sparse_fwd(q, kv, i, 0.1, out=o)
door.flash_mla_sparse_fwd(q, kv, i, 0.1, 256)  # flash_mla
other.flash_mla_sparse_fwd(q, kv, i)
""",
        "vllm/third_party/flashmla/flash_mla_interface.py": "import flash_mla\nflash_mla.x()\n",
    }
    assert checked(tmp_path, files) == {
        "p/models/a.py:6 flash_mla_sparse_fwd": ("taken", ""),
        "p/models/a.py:7 flash_mla_sparse_fwd": ("not taken", "d_v: want 512, got 256"),
        "p/models/a.py:8 flash_mla_sparse_fwd": (
            "not taken",
            "missing a required argument: 'sm_scale'",
        ),
    }


def test_values_of_decode(tmp_path):
    text = """
from flash_mla import flash_mla_with_kvcache as f, get_mla_metadata
plan, none = get_mla_metadata(lengths, 16, 1)
f(q, k, None, None, 512, plan, is_fp8_kvcache=True, indices=i, use_legacy=True, descale_q=None)
f(q, k, table, lengths, 512, plan, none, causal=True)
f(q, k, None, None, width, plan, is_fp8_kvcache=flag, indices=i, causal=flag)
f(q, k, None, None, 512, plan, indices=i)
f(q, k, None, None, 512, plan, is_fp8_kvcache=True, indices=i, causal=True)
f(q, k, None, None, 576, plan, is_fp8_kvcache=True, indices=i)
f(q, k, None, None, 512, plan, is_fp8_kvcache=True, indices=i, kv_format="V32_NO_ROPE")
f(q, k, None, None, 512, plan, None, 1.0, False, True, i, s, e, x, l, l, o, False, 3)
"""
    found = checked(tmp_path, {"a.py": text})
    assert found.pop("a.py:3 get_mla_metadata") == ("taken", "")
    assert [reason for _, (_, reason) in sorted(found.items(), key=lambda f: int(f[0][5:7]))] == [
        "",
        "",
        "",
        "is_fp8_kvcache: want True, got False",
        "causal: want False, got True",
        "head_dim_v: want 512, got 576",
        "kv_format: want None or V32 or V4, got V32_NO_ROPE",
        "too many positional arguments",
    ]


def test_objects_are_followed(tmp_path):
    text = """
from typing import Optional
import deep_ep
from deep_ep.utils import EventOverlap

class Dispatcher:
    def __init__(self, buffer: "Optional[deep_ep.Buffer]", event: EventOverlap):
        self.buffer, self.event = buffer, event
        event.current_stream_wait()

    @property
    def mine(self):
        return self.buffer

    def run(self):
        self.buffer.dispatch(x, handle=h)
        self.mine.combine(x, h, weights=w)
        deep_ep.Buffer.set_num_sms(24)
        self.buffer.get_local_buffer_tensor(dtype)
        self.buffer.internode_dispatch(x)
        self.buffer.group.size()

def make(group, state):
    state.shared = deep_ep.ElasticBuffer(group, num_bytes=1)
    return deep_ep.Buffer(group, 1, 2, low_latency_mode=True)

def use(state, anything, group):
    make(group, state).low_latency_combine(x, i, w, h, use_logfmt=True)
    state.shared.dispatch(x, topk_idx=i)
    state.shared.barrier()
    anything.low_latency_dispatch(x, i, 128, 8)
    anything.dispatch(x)
    anything.a_buffer.dispatch(x)
"""
    found = checked(tmp_path, {"a.py": text})
    assert statuses(found) == {
        "a.py:9 current_stream_wait": "taken",
        "a.py:16 dispatch": "taken",
        "a.py:17 combine": "not taken",
        "a.py:18 set_num_sms": "taken",
        "a.py:19 get_local_buffer_tensor": "taken",
        "a.py:20 internode_dispatch": "not taken",
        "a.py:24 ElasticBuffer": "taken",
        "a.py:25 Buffer": "taken",
        "a.py:28 low_latency_combine": "not taken",
        "a.py:29 dispatch": "taken",
        "a.py:30 barrier": "not taken",
        "a.py:31 low_latency_dispatch": "not judged",
        "a.py:33 dispatch": "not judged",
    }
    assert found["a.py:28 low_latency_combine"][1] == "use_logfmt: want False, got True"
    assert found["a.py:33 dispatch"][1] == "the class of the object is not known"


def test_reading_ends(tmp_path):
    text = """
import deep_gemm

x = deep_gemm
for _ in range(9):
    x = x.next
def f():
    return g()
def g():
    return f() or x
class A(B):
    pass
class B(A):
    pass
A().y(f()), B.z
g()()
"""
    found = checked(tmp_path, {"a.py": text})
    assert set(statuses(found).values()) == {"passed on", "not judged"}


def test_what_cannot_be_read_is_not_taken_for_taken(tmp_path):
    text = """
import functools
import deep_gemm

FIXED = dict(logits_dtype=None)

def call(*args, **kwargs):
    deep_gemm.fp8_mqa_logits(*args, **kwargs)
    deep_gemm.fp8_mqa_logits(*args, x=1)
    deep_gemm.fp8_mqa_logits(q, kv, w, s, e, **FIXED)
    more = {} if kwargs is None else {"max_seqlen_k": 5}
    deep_gemm.fp8_mqa_logits(q, kv, w, s, e, **more)
    others = {}
    if args:
        others["scale"] = 1
    deep_gemm.fp8_mqa_logits(q, kv, w, s, e, **others)
    later = {}
    later.update(kwargs)
    deep_gemm.fp8_mqa_logits(q, kv, w, s, e, **later)
    functools.partial(deep_gemm.fp8_mqa_logits, q)
    isinstance(deep_gemm.fp8_mqa_logits, type)
    getattr(deep_gemm, kwargs["name"])(x=1), getattr(kwargs, kwargs["name"])(x=1)
    from deep_gemm.utils import *
    from others import *
    deep_gemm.fp8_fp4_mqa_logits(q, kv, w, s, e, 100)
"""
    unread = ("not judged", "not all of its arguments can be read")
    assert checked(tmp_path, {"a.py": text, "b.py": "import deep_gemm\ndeep_gemm.f(\n"}) == {
        "a.py:8 fp8_mqa_logits": unread,
        "a.py:9 fp8_mqa_logits": ("not taken", "there is no argument x"),
        "a.py:10 fp8_mqa_logits": ("taken", ""),
        "a.py:12 fp8_mqa_logits": ("taken", ""),
        "a.py:16 fp8_mqa_logits": ("not taken", "where it gives scale"),
        "a.py:19 fp8_mqa_logits": unread,
        "a.py:20 fp8_mqa_logits": ("not judged", "it is passed on to functools.partial"),
        "a.py:22 deep_gemm": ("not judged", "a name is computed that is taken from it"),
        "a.py:23 utils": ("not judged", "all its names are imported"),
        "a.py:25 fp8_fp4_mqa_logits": ("taken", "for data in 8 bits"),
        "b.py:2 deep_gemm": ("not judged", "no Python: '(' was never closed (<unknown>, line 2)"),
    }


@pytest.mark.parametrize(
    "assignments, status",
    [
        (["k0 = k0"], "not judged"),
        (["k0 = k0 if x else {}"], "not judged"),
        (["k0 = k1", "k1 = k0"], "not judged"),
        (["k0 = {}", *(f"k{i + 1} = k{i} if x else k{i}" for i in range(60))], "taken"),
        (["k0 = {}", *(f"k{i + 1} = k{i}" for i in range(3000))], "not judged"),
    ],
    ids=["itself", "its-default", "each-other", "twice", "chain"],
)
def test_keys_are_read_to_an_end(assignments, status, tmp_path):
    last = len(assignments) - 1 if "k0 = {}" in assignments else 0
    call = f"deep_gemm.fp8_mqa_logits(q, kv, w, s, e, **k{last})"
    text = "\n".join(["import deep_gemm", *assignments, call])
    assert list(statuses(checked(tmp_path, {"a.py": text})).values()) == [status]


def test_imports_that_fail(tmp_path):
    text = """
from typing import TYPE_CHECKING
from deep_gemm import fp8_gemm_nt, fp8_mqa_logits
from flash_mla import fused_norm_rope_attn_rope_cast as fused
try:
    from deep_gemm.utils.layout import transform
except ImportError:
    transform = None
if TYPE_CHECKING:
    from deep_gemm import SymmBuffer

fp8_gemm_nt(a, b)
fused.prefill(q)
torch.ops._flashmla_C.dense_decode_fwd(q)
"""
    found = checked(tmp_path, {"a.py": text})
    to_deep_gemm = "to deep_gemm, which must be installed"
    assert found == {
        "a.py:3 fp8_gemm_nt": ("passed on", f"{to_deep_gemm}; else the import fails"),
        "a.py:12 fp8_gemm_nt": ("passed on", to_deep_gemm),
        "a.py:13 prefill": ("passed on", "to flash_mla, which must be installed"),
        "a.py:14 dense_decode_fwd": ("passed on", "to an operator of the package's own copy"),
    }


def test_what_other_processors_have_is_refused_by_name(tmp_path):
    text = """
import deep_ep

def run(buffer: deep_ep.Buffer, npu):
    buffer.low_latency_dispatch(x, i, 128, 8, use_nvfp4=True)
    more = dict(topk_weights=w) if npu else {}
    buffer.low_latency_dispatch(x, i, 128, 8, **(dict(x_global_scale=s) if npu else {}), **more)
    buffer.low_latency_dispatch(x, i, 128, 8, use_nvfp4=True, of_a_fork=True)
    buffer.low_latency_combine(x, i, w, h, overlap=True, comp_signal=s, return_recv_hook=True)
    buffer.fused_deep_moe(x)
"""
    nvfp4, ascend = "rows in NVFP4, a format of Blackwell GPUs", "a build for Ascend NPUs has it"
    assert checked(tmp_path, {"a.py": text}) == {
        "a.py:5 low_latency_dispatch": (
            "refused by name",
            f"there is no argument use_nvfp4: {nvfp4}",
        ),
        "a.py:7 low_latency_dispatch": (
            "refused by name",
            f"where it gives topk_weights or x_global_scale: {ascend}; {nvfp4}",
        ),
        "a.py:8 low_latency_dispatch": (
            "not taken",
            "there is no argument of_a_fork or use_nvfp4",
        ),
        "a.py:9 low_latency_combine": ("taken", ""),
        "a.py:10 fused_deep_moe": ("refused by name", ascend),
    }


def test_the_reasons_are_of_names_that_are_not_here():
    for name in _check._REFUSED:
        function, _, argument = name.partition(": ")
        found = _check._stand_in(function)
        assert (
            found is None if not argument else argument not in inspect.signature(found).parameters
        )


def test_the_command(tmp_path, capsys):
    taken = "import flash_mla\nflash_mla.get_mla_metadata()\n"
    others = "import deep_gemm\ndeep_gemm.f()\ndeep_gemm.fp8_mqa_logits(x=1)\n"
    written(tmp_path, {"p/a.py": taken, "p/b.py": others})
    everything = forked("-m", "winnow.compat", "check", tmp_path / "p")
    assert everything.returncode == 1, everything.stderr
    lines = everything.stdout.splitlines()
    assert lines[0] == "a.py:2: flash_mla.get_mla_metadata: taken"
    assert lines[1] == "b.py:2: deep_gemm.f: passed on: to deep_gemm, which must be installed"
    assert lines[2] == "b.py:3: deep_gemm.fp8_mqa_logits: not taken: there is no argument x"
    assert lines[-2].split() == ["deep_gemm", "0", "1", "0", "1", "0"]
    assert lines[-1].split() == ["flash_mla", "1", "0", "0", "0", "0"]
    written(tmp_path, {"q/b.py": "import deep_gemm\ndeep_gemm.f()\n"})
    assert main(["check", str(tmp_path / "q")]) == 0  # what is passed on is no failure
    assert "passed on" in capsys.readouterr().out
    assert main(["check", str(tmp_path / "p"), "flash_mla", "deep_ep"]) == 0
    assert "deep_gemm" not in capsys.readouterr().out
    for wrong, text in (
        (["check", tmp_path / "p", "torch"], "name: want deep_ep, deep_gemm, flash_mla, got torch"),
        (["check", tmp_path / "none"], "folder: want one with Python files, got "),
        (["path"], "the following arguments are required: name"),
        (["path", "torch"], "invalid choice: 'torch'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(list(map(str, wrong)))
        assert ended.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("names", [("flash_mla",), ("deep_gemm", "flash_mla")])
def test_the_folders_have_the_named_packages_alone(names, capsys):
    path = compat.path(*names)
    assert main(["path", *names]) == 0 and capsys.readouterr().out == path + "\n"
    assert [Path(one).name for one in path.split(os.pathsep)] == list(names)
    program = """
import importlib.util, sys
import flash_mla
from flash_mla import flash_mla_interface, fused_norm_rope_attn_rope_cast
found = [n for n in ("deep_ep", "deep_gemm", "flash_mla") if importlib.util.find_spec(n)]
if "deep_gemm" in found:
    import deep_gemm
    assert deep_gemm.fp8_mqa_logits.__module__ == "winnow.compat.deep_gemm"
print(flash_mla.flash_mla_sparse_fwd.__module__, *found)
"""
    shown = forked("-c", program, path=path.split(os.pathsep), check=True).stdout
    assert shown.split() == ["winnow.compat.flash_mla", *names]


def test_a_folder_of_no_library_is_refused():
    with pytest.raises(ValueError, match="compat.path: name: want deep_ep or .*, got torch"):
        compat.path("deep_ep", "torch")


CALL = "from deep_gemm import fp8_mqa_logits as run\n"


def test_a_function_of_the_name_of_a_module_hides_nothing(tmp_path):
    found = checked(
        tmp_path,
        {
            "pkg/__init__.py": "# deep_gemm\ndef ops():\n    return 1\n",
            "pkg/ops.py": CALL,
            "pkg/ops/__init__.py": CALL,
            "pkg/use.py": "from pkg.ops import run  # deep_gemm\nrun(1)\n",
        },
    )
    assert statuses(found) == {"pkg/use.py:2 fp8_mqa_logits": "not taken"}


@pytest.mark.parametrize(
    "text",
    [
        "import deep_gemm\nx = deep_gemm" + ".a()" * 900,
        'import deep_gemm\ndef f(x: "' + "(" * 3000 + '"):\n    return x\n',
        'import deep_gemm\ndef f(x: "deep_gemm' + ".a" * 900 + '"):\n    return x\n',
        "import deep_gemm\nm = deep_gemm\n" + "".join(f"m = m.a{i}\n" for i in range(25)),
    ],
    ids=["chain", "annotation", "long-annotation", "product"],
)
def test_sources_that_are_too_deep(text, tmp_path):
    files = {"a.py": text, "b.py": "import deep_gemm\ndeep_gemm.fp8_mqa_logits(x=1)\n"}
    found = checked(tmp_path, files)
    assert found["b.py:2 fp8_mqa_logits"][0] == "not taken"
    assert all(status == "not judged" or where[0] == "b" or status == "passed on"
               for where, (status, _) in found.items())  # fmt: skip


def test_names_that_no_terminal_shows(tmp_path, capsys):
    name = os.fsdecode(b"bad\xff.py")
    (tmp_path / name).write_text('import flash_mla\nflash_mla.get_mla_metadata(**{"\\ud800": 1})\n')
    assert main(["check", str(tmp_path)]) == 0
    assert "get_mla_metadata: taken" in capsys.readouterr().out


def test_names_that_a_terminal_would_obey(tmp_path, capsys):
    (tmp_path / "a\n\x1b[2J.py").write_text(
        "import flash_mla\n"
        'flash_mla.flash_mla_with_kvcache(q, k, t, l, 512, md, kv_format="\\x1b[2J")\n'
    )
    assert main(["check", str(tmp_path)]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(r"a\n\x1b[2J.py:2:") and first.endswith(r"got \x1b[2J")


def test_constants_that_dense_decode_refuses(tmp_path):
    call = "import flash_mla\nflash_mla.flash_mla_with_kvcache(q, k, {}, 512, md)\n"
    found = checked(
        tmp_path,
        {
            "a.py": call.format("None, lens"),
            "b.py": call.format("table, None"),
            "c.py": call.format("table, lens").replace("md)", 'md, kv_format="V4")'),
            "d.py": call.format("table, lens"),
        },
    )
    reasons = {where[0]: reason for where, (_, reason) in found.items()}
    assert statuses(found)["d.py:2 flash_mla_with_kvcache"] == "taken"
    assert reasons["a"] == "block_table: want a tensor without indices, got None"
    assert reasons["b"] == "cache_seqlens: want a tensor without indices, got None"
    assert reasons["c"] == "kv_format: want None or V32, got V4"


def test_arguments_that_a_call_may_have_do_not_hide_one_that_is_missing(tmp_path):
    text = """
import flash_mla
more = {}
if x:
    more["causal"] = False
flash_mla.flash_mla_with_kvcache(q, k, table, lens, 512, md, **more)
flash_mla.flash_mla_with_kvcache(q, k, **more)
"""
    missing = "missing a required argument: 'block_table'"
    assert checked(tmp_path, {"a.py": text}) == {
        "a.py:6 flash_mla_with_kvcache": ("taken", ""),
        "a.py:7 flash_mla_with_kvcache": ("not taken", missing),
    }


def test_imports_that_run_are_not_guarded(tmp_path):
    found = checked(
        tmp_path,
        {
            "a.py": "if TYPE_CHECKING:\n    pass\nelse:\n    from deep_ep import nosuch\n",
            "b.py": "try:\n    import x\nexcept ImportError:\n    from deep_ep import nosuch\n",
            "c.py": "try:\n    from deep_ep import nosuch\nexcept ImportError:\n    pass\n",
        },
    )
    assert statuses(found) == {
        "a.py:4 nosuch": "not taken", "b.py:4 nosuch": "not taken",
    }  # fmt: skip


@pytest.mark.parametrize("order", [1, -1])
def test_long_chains_of_names_are_read_in_linear_time(tmp_path, monkeypatch, order):
    """Each statement again only when something that it reads has changed, not all of them."""
    count, reads, read = 500, [], _values.Package._read

    def counting(package, scope, node):
        reads.append(node)
        return read(package, scope, node)

    monkeypatch.setattr(_values.Package, "_read", counting)
    names = [f"a{i + 1} = a{i}" for i in range(count)][::order]
    returns = [f"def f{i + 1}(): return f{i}()" for i in range(count)][::order]
    text = "\n".join([
        "import flash_mla as a0", *names, f"def f0(): return a{count}.flash_mla_sparse_fwd",
        *returns, f"f{count}()(1)",
    ])  # fmt: skip
    found = checked(tmp_path, {"a.py": text + "\n"})
    assert list(statuses(found).values()) == ["not taken"]
    assert len(reads) < 10 * count
