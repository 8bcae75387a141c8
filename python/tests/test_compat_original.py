"""What Winnow's modules pass on to the libraries that they replace, on small packages with their
names."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import forked, python

from winnow import compat

# A package that imports itself by name, and whose submodules take what stands in its __init__.
DEEP_GEMM = {
    "deep_gemm/__init__.py": """
import deep_gemm as itself
from deep_gemm.utils.layout import align
from . import utils
from .{extension} import __doc__ as of_extension

offset = 5
from .mega import Buffer

def product(a, b):
    return a * b + utils.layout.bias()

def fp8_mqa_logits(*arguments):
    raise AssertionError("Winnow's is called")

_sms = 132

def get_num_sms():
    return _sms

def set_num_sms(number):
    global _sms
    _sms = number
""",
    "deep_gemm/utils/__init__.py": "from . import layout\n",
    "deep_gemm/utils/layout.py": """
def align(x):
    return -(-x // 16) * 16

def bias():
    from .. import offset
    return offset
""",
    "deep_gemm/mega.py": "from . import offset\n\nclass Buffer:\n    size = offset\n",
    "deep_gemm/testing.py": "from deep_gemm import product\nloaded = product(1, 1)\n",
}
FLASH_MLA = {
    "flash_mla/__init__.py": """
from flash_mla._loader import operators
from flash_mla.flash_mla_interface import flash_mla_with_kvcache, flash_attn_varlen_func
""",
    "flash_mla/_loader.py": "operators = 'loaded'\n",
    "flash_mla/flash_mla_interface.py": """
from flash_mla._loader import operators

def flash_mla_with_kvcache(*arguments):
    raise AssertionError("Winnow's is called")

def flash_attn_varlen_func(*arguments, **options):
    return (operators, arguments, options)
""",
}
FUSED = {
    "flash_mla/fused_norm_rope_attn_rope_cast.py": """
from flash_mla._loader import operators

def prefill(**options):
    return (operators, options)
"""
}


def extension():
    """A compiled module of Python's own, by name and file."""
    specs = map(find_spec, ("_statistics", "_queue", "_json", "_lsprof"))
    found = next(spec for spec in specs if spec and str(spec.origin).endswith(".so"))
    return found.name, Path(found.origin)


def written(folder, files):
    name, file = extension()
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.replace("{extension}", name))
    if "deep_gemm/utils/__init__.py" in files:
        (folder / "deep_gemm" / file.name).symlink_to(file)
    return folder


# For the programs below.
REFUSED = """
def refused(kind, said, call):
    try:
        call()
    except kind as error:
        assert said in str(error), error
        return error
    raise SystemError(said)
"""


def passes(program, *names, folders=(), check=True):
    """Runs it with our modules of these names before packages of those folders."""
    ours = compat.path(*names).split(os.pathsep) if names else []
    return forked("-c", REFUSED + program, path=[*ours, *folders], check=check)


USE_OF_DEEP_GEMM = """
import importlib, importlib.util, pickle, subprocess, sys
{first}
import deep_gemm
from deep_gemm import fp8_mqa_logits, product

ours = "winnow.compat.deep_gemm"
assert fp8_mqa_logits.__module__ == deep_gemm.fp8_paged_mqa_logits.__module__ == ours
assert product(2, 3) == deep_gemm.product(2, 3) == 11
assert deep_gemm.itself is deep_gemm is sys.modules["deep_gemm"]
assert deep_gemm.itself.fp8_mqa_logits is fp8_mqa_logits and deep_gemm.of_extension

# Submodules: those that it has imported, in each way, and one that it has not.
import deep_gemm.utils.layout
from deep_gemm.utils import layout
assert layout is deep_gemm.utils.layout is importlib.import_module("deep_gemm.utils.layout")
assert layout is sys.modules["deep_gemm.utils.layout"] and layout.align(17) == 32
assert "deep_gemm.testing" not in sys.modules and not hasattr(deep_gemm, "testing")
assert importlib.util.find_spec("deep_gemm.testing") and importlib.util.find_spec("deep_gemm")
from deep_gemm import testing
assert testing is sys.modules["deep_gemm.testing"] and testing.loaded == 6
assert [m for m in sys.modules if m.startswith("winnow") and m.endswith("testing")] == []

# Names that neither has.
assert not hasattr(deep_gemm, "nothing") and getattr(deep_gemm, "nothing", 7) == 7
for wrong in ("from deep_gemm import nothing", "import deep_gemm.nothing"):
    refused(ImportError, "nothing", lambda: exec(wrong))

# Its products take the number of multiprocessors.
from winnow.compat import deep_gemm as direct
deep_gemm.set_num_sms(20)
assert deep_gemm.get_num_sms() == direct.get_num_sms() == deep_gemm._sms == 20
direct.set_num_sms(30)
assert deep_gemm._sms == 30
assert direct.product is product and direct.utils is deep_gemm.utils

made = pickle.loads(pickle.dumps(deep_gemm.Buffer))
assert made is deep_gemm.Buffer and made.size == 5 and made.__module__ == "deep_gemm.mega"
from winnow import compat
assert compat.install("deep_gemm") is deep_gemm
"""


@pytest.mark.parametrize("way", ["path", "install"])
def test_deep_gemm_is_completed_by_the_original(tmp_path, way):
    written(tmp_path, DEEP_GEMM)
    first = "from winnow import compat\ncompat.install('deep_gemm')" if way == "install" else ""
    names = ["deep_gemm"] if way == "path" else []
    passes(USE_OF_DEEP_GEMM.replace("{first}", first), *names, folders=[tmp_path])


def test_processes_that_are_started_have_both(tmp_path):
    written(tmp_path, DEEP_GEMM)
    program = "import deep_gemm as d; print(d.product(2, 2), d.fp8_mqa_logits.__module__)"
    entries = compat.path("deep_gemm", "flash_mla"), tmp_path, os.environ.get("PYTHONPATH", "")
    path = {"PYTHONPATH": os.pathsep.join(map(str, entries))}
    assert python("-c", program, add=path).stdout == "9 winnow.compat.deep_gemm\n"


def test_the_original_is_found_without_our_folder(tmp_path):
    """As where a program imports winnow.compat.deep_gemm itself: the library stays as it is."""
    written(tmp_path, DEEP_GEMM)
    program = """
import sys
from winnow.compat import deep_gemm
assert "deep_gemm" not in sys.modules
assert deep_gemm.product(1, 2) == 7
import deep_gemm as theirs
assert theirs.fp8_mqa_logits is not deep_gemm.fp8_mqa_logits and theirs.product is deep_gemm.product
from winnow import compat
refused(ValueError, "want no deep_gemm imported before", lambda: compat.install("deep_gemm"))
"""
    passes(program, folders=[tmp_path])


WITHOUT = """
import importlib, importlib.util
import deep_gemm, flash_mla, winnow
assert deep_gemm.__name__ == "winnow.compat.deep_gemm" and deep_gemm.get_num_sms() > 0
assert not hasattr(deep_gemm, "product") and not hasattr(flash_mla, "operators")
error = refused(winnow.Error, "install DeepGEMM", lambda: deep_gemm.product)
assert error.code == "unsupported"
for wrong in ("import deep_gemm.utils", "from deep_gemm.utils import layout", "import flash_mla.x"):
    refused(ModuleNotFoundError, "is not a package", lambda: exec(wrong))
dense = lambda: flash_mla.flash_attn_varlen_func(1)
refused(winnow.Error, "dense attention is not here", dense)
{after}
"""


def test_without_the_original(tmp_path):
    """Nor is a folder of that name one, which has no package in it."""
    (tmp_path / "deep_gemm").mkdir()
    passes(WITHOUT.replace("{after}", ""), "deep_gemm", "flash_mla", folders=[tmp_path])


def test_one_that_comes_onto_the_path_later_is_found(tmp_path):
    written(tmp_path, DEEP_GEMM)
    after = f"""
import sys
sys.path.append({str(tmp_path)!r})
assert deep_gemm.product(1, 1) == 6 and sys.modules["deep_gemm"].product(1, 1) == 6
import deep_gemm as again
assert again.fp8_mqa_logits is deep_gemm.fp8_mqa_logits and again.utils.layout.align(1) == 16
"""
    passes(WITHOUT.replace("{after}", after), "deep_gemm", "flash_mla")


def test_the_folder_of_another_winnow_is_no_original(tmp_path):
    other = Path(compat.path("deep_gemm")) / "deep_gemm" / "__init__.py"
    written(tmp_path / "a", {"deep_gemm/__init__.py": other.read_text()})
    written(tmp_path / "b", DEEP_GEMM)
    program = "import deep_gemm\nassert deep_gemm.product(1, 1) == 6"
    passes(program, "deep_gemm", folders=[tmp_path / "a", tmp_path / "b"])


def test_the_error_of_an_original_that_cannot_be_imported_is_shown(tmp_path):
    broken = dict(DEEP_GEMM)
    broken["deep_gemm/__init__.py"] += "\nassert False, 'no CUDA_HOME'\n"
    written(tmp_path, broken)
    program = """
import sys
import deep_gemm
from deep_gemm import fp8_mqa_logits
assert deep_gemm is sys.modules["deep_gemm"] and deep_gemm.__name__ == "winnow.compat.deep_gemm"
assert [name for name in sys.modules if name.startswith("deep_gemm.")] == []
uses = ("deep_gemm.product", "from deep_gemm import product", "hasattr(deep_gemm, 'product')")
for use in uses:
    assert str(refused(AssertionError, "", lambda: exec(use))) == "no CUDA_HOME"
assert deep_gemm.get_num_sms() > 0
deep_gemm.set_num_sms(20)
assert deep_gemm.get_num_sms() == 20
"""
    passes(program, "deep_gemm", folders=[tmp_path])


USE_OF_FLASH_MLA = """
import sys
import flash_mla
from flash_mla import flash_mla_interface, fused_norm_rope_attn_rope_cast as fused
from flash_mla.flash_mla_interface import flash_attn_varlen_func, flash_mla_with_kvcache
import flash_mla.fused_norm_rope_attn_rope_cast
import winnow
from winnow.compat import flash_mla as direct

assert flash_mla.operators == "loaded" and flash_mla.flash_mla_interface is flash_mla_interface
assert flash_mla_with_kvcache is flash_mla.flash_mla_with_kvcache is direct.flash_mla_with_kvcache
assert flash_mla.get_mla_metadata is flash_mla_interface.get_mla_metadata
# Sizes of packed sequences: the original's, by any name that leads to it.
for function in (flash_attn_varlen_func, flash_mla.flash_attn_varlen_func,
                 direct.flash_attn_varlen_func):
    assert function(1, scale=2) == ("loaded", (1,), {"scale": 2})
assert flash_mla.fused_norm_rope_attn_rope_cast is fused
assert fused is sys.modules["flash_mla.fused_norm_rope_attn_rope_cast"]
# What the original does not have is refused.
dense = lambda: flash_mla.flash_attn_varlen_kvpacked_func(1)
refused(winnow.Error, "dense attention is not here", dense)
try:
    got = direct.fused_norm_rope_attn_rope_cast.prefill(sm_scale=1), fused.prefill(sm_scale=1)
except winnow.Error as error:
    got = str(error)
"""


@pytest.mark.parametrize("fused", [True, False])
def test_flash_mla_is_completed_by_the_original(tmp_path, fused):
    written(tmp_path, {**FLASH_MLA, **(FUSED if fused else {})})
    wanted = '(("loaded", {"sm_scale": 1}),) * 2' if fused else "got"
    check = f"assert got == {wanted}, got\nassert ('not fused here' in got) is {not fused}\n"
    passes(USE_OF_FLASH_MLA + check, "flash_mla", folders=[tmp_path])


def test_vllms_copy_is_an_original_in_vllms_processes(tmp_path):
    copy = {f"vllm/third_party/{name}": text for name, text in DEEP_GEMM.items()}
    copy["vllm/third_party/deep_gemm/__init__.py"] = "def product(a, b):\n    return a + b\n"
    written(tmp_path, {**copy, "vllm/__init__.py": "", "vllm/third_party/__init__.py": ""})
    program = """
import {first}deep_gemm
assert hasattr(deep_gemm, "product") is {found}
assert deep_gemm.fp8_mqa_logits.__module__ == "winnow.compat.deep_gemm"
if {found}:
    assert deep_gemm.product(2, 3) == 5
    from vllm.third_party import deep_gemm as copy
    assert copy.fp8_mqa_logits is deep_gemm.fp8_mqa_logits
"""
    for first, found in (("vllm, ", "True"), ("", "False")):
        text = program.replace("{first}", first).replace("{found}", found)
        passes(text, "deep_gemm", folders=[tmp_path])


def test_vllms_copy_is_executed_once(tmp_path):
    package = "vllm/third_party/deep_gemm"
    files = {f"{package}/{name}.py": "class Layout: pass\n" for name in ("utils", "later")}
    files[f"{package}/__init__.py"] = "from . import utils\n"
    written(tmp_path, {**files, "vllm/__init__.py": "", "vllm/third_party/__init__.py": ""})
    program = """
import importlib.util
import vllm, deep_gemm
from vllm.third_party import deep_gemm as copy
import deep_gemm.utils, deep_gemm.later
from deep_gemm.later import Layout
import vllm.third_party.deep_gemm.later as later
assert deep_gemm.utils is copy.utils and deep_gemm.later is later and Layout is later.Layout
assert later.__name__ == later.__spec__.name == "vllm.third_party.deep_gemm.later"
assert importlib.util.find_spec("deep_gemm.nothing") is None
"""
    passes(program, "deep_gemm", folders=[tmp_path])


def test_a_vllm_without_the_copy_has_none(tmp_path):
    program = """
import sys, types
sys.modules["vllm"] = types.ModuleType("vllm")
import deep_gemm
assert not hasattr(deep_gemm, "product") and deep_gemm.get_num_sms() > 0
"""
    passes(program, "deep_gemm")


def test_vllms_copy_is_found_when_vllm_is_imported_later(tmp_path):
    files = {"vllm/third_party/deep_gemm/__init__.py": "def product(a, b):\n    return a + b\n"}
    written(tmp_path, {**files, "vllm/__init__.py": "", "vllm/third_party/__init__.py": ""})
    program = """
import deep_gemm
assert not hasattr(deep_gemm, "product")
import vllm
assert deep_gemm.product(2, 3) == 5
"""
    passes(program, "deep_gemm", folders=[tmp_path])


# What another thread sees while the library is executed, in each way that starts that.
THREADS = """
import sys, threading, time, types
gate = types.ModuleType("gate")
gate.executing = threading.Event()
sys.modules["gate"] = gate
{before}

def other():
    gate.executing.wait()
    for program in {programs}:
        try:
            exec(program, {})
        except BaseException as error:
            wrong.append((program, error))

wrong = []
threads = [threading.Thread(target=other) for _ in range(3)]
for thread in threads:
    thread.start()
{first}
for thread in threads:
    thread.join(30)
    assert not thread.is_alive(), "it waits for ever"
assert wrong == [], wrong
"""
SLOW = """
import gate, time
from {name} import {inside}
gate.executing.set()
time.sleep(0.3)

def {function}(*arguments):
    raise AssertionError("Winnow's is called")

def more():
    return 5
"""


@pytest.mark.parametrize("first", ["import", "attribute"])
def test_other_threads_wait_for_the_original(tmp_path, first):
    slow = SLOW.replace("{name}", "deep_gemm").replace("{inside}", "inner")
    slow = slow.replace("{function}", "fp8_mqa_logits")
    written(tmp_path, {"deep_gemm/__init__.py": slow, "deep_gemm/inner.py": ""})
    ours = "assert fp8_mqa_logits.__module__ == 'winnow.compat.deep_gemm'"
    programs = [
        f"from deep_gemm import fp8_mqa_logits, more; {ours}; assert more() == 5",
        "from winnow.compat import deep_gemm; assert deep_gemm.more() == 5",
        "import deep_gemm; assert deep_gemm.more() == 5 and hasattr(deep_gemm, 'get_num_sms')",
    ]
    # The attribute: the library comes onto the path when our module stands there already.
    late = f"import deep_gemm\nsys.path.append({str(tmp_path)!r})"
    text = THREADS.replace("{programs}", repr(programs))
    text = text.replace("{before}", "import winnow.compat.deep_gemm" if first == "import" else late)
    text = text.replace("{first}", "import deep_gemm" if first == "import" else "deep_gemm.more()")
    passes(text, "deep_gemm", folders=[tmp_path] if first == "import" else [])


def test_other_threads_wait_for_its_submodules(tmp_path):
    slow = SLOW.replace("{name}", "flash_mla._loader").replace("{inside}", "operators")
    slow = slow.replace("{function}", "flash_mla_with_kvcache")
    files = {**FLASH_MLA, "flash_mla/flash_mla_interface.py": slow}
    files["flash_mla/__init__.py"] = """
from flash_mla.flash_mla_interface import more
import time
time.sleep(0.3)
"""
    written(tmp_path, files)
    ours = "assert flash_mla_with_kvcache.__module__ == 'winnow.compat.flash_mla'"
    programs = [
        f"from flash_mla.flash_mla_interface import flash_mla_with_kvcache; {ours}",
        f"from flash_mla import flash_mla_with_kvcache, more; {ours}",
        "from flash_mla.fused_norm_rope_attn_rope_cast import prefill",
    ]
    text = THREADS.replace("{programs}", repr(programs)).replace("{first}", "import flash_mla")
    passes(text.replace("{before}", "import winnow"), "flash_mla", folders=[tmp_path])


UNWRITABLE = """
import sys

class Library:
    __slots__ = ()

    def fp8_mqa_logits(self, *arguments):
        raise AssertionError("Winnow's is called")

sys.modules[__name__] = Library()
"""


def test_our_module_stays_where_the_original_takes_no_attributes(tmp_path):
    written(tmp_path, {"deep_gemm/__init__.py": UNWRITABLE})
    program = """
import deep_gemm
from winnow import compat
assert compat.install("deep_gemm") is deep_gemm
assert deep_gemm.fp8_mqa_logits.__module__ == "winnow.compat.deep_gemm"
said = "cannot complete the library: it takes no fp8_"
refused(ImportError, said, lambda: deep_gemm.product)
"""
    passes(program, "deep_gemm", folders=[tmp_path])


def test_a_submodule_that_cannot_be_imported_stays_ours(tmp_path):
    broken = {"flash_mla/fused_norm_rope_attn_rope_cast.py": "raise ImportError('needs SM100')\n"}
    written(tmp_path, {**FLASH_MLA, **broken})
    wanted = "assert 'not fused here' in got, got\n"
    passes(USE_OF_FLASH_MLA + wanted, "flash_mla", folders=[tmp_path])


def test_a_refused_install_changes_nothing():
    program = """
import sys, types
from winnow import compat
theirs = sys.modules["flash_mla.flash_mla_interface"] = types.ModuleType("theirs")
before = dict(sys.modules)
said = "want no flash_mla.flash_mla_interface imported before"
refused(ValueError, said, lambda: compat.install("flash_mla"))
assert [key for key in sys.modules if key not in before] == []
assert "flash_mla" not in sys.modules
"""
    passes(program)


def test_nothing_is_passed_on_to_deep_ep(tmp_path):
    """Objects of both do not fit together."""
    written(tmp_path, {"deep_ep/__init__.py": "more = 1\n"})
    program = "import deep_ep\nassert not hasattr(deep_ep, 'more')"
    passes(program, "deep_ep", folders=[tmp_path])


def test_the_library_is_not_imported_for_our_own_names(tmp_path):
    written(tmp_path, {"deep_gemm/__init__.py": "raise SystemExit('imported')\n"})
    program = "from winnow.compat.deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits"
    passes(program, folders=[tmp_path])
    ended = passes("import deep_gemm", "deep_gemm", folders=[tmp_path], check=False)
    assert "imported" in ended.stderr
    assert "deep_gemm" not in sys.modules
