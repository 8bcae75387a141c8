"""Tests that `make test` skips: its last lines say why, and it fails where no reason is listed."""

import os
import shutil
import sys
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).resolve().parents[2]

# A ctest whose tests said this. Those of GoogleTest print more around it.
_CTEST = """#!/bin/sh
while [ "$1" != --output-junit ]; do shift; done
cat > "$2" <<'END'
<testsuite>
<testcase name="A.Runs" classname="A.Runs" status="run"><system-out>: Skipped
no</system-out></testcase>
<testcase name="A.Gpu" classname="A.Gpu" status="notrun">
<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
<system-out>[ RUN      ] A.Gpu
/a/gpu_test.cc:20: Skipped
the CUDA driver shows no GPU
[  SKIPPED ] A.Gpu (0 ms)
</system-out></testcase>
<testcase name="B" classname="B" status="notrun">
<skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/><system-out>SKIPPED: {reason}
</system-out></testcase>
</testsuite>
END
echo "100% tests passed, 0 tests failed out of 3"
echo "The following tests did not run:"
"""

_PYTEST = """
import pytest

def test_runs(): pass
def test_skips(): pytest.skip("needs two GPUs")
@pytest.mark.skipif(True, reason="no CUDA GPU")
@pytest.mark.parametrize("case", [1, 2])
def test_gpu(case): pass
"""


@pytest.fixture
def run_tests(tmp_path):
    """run(parts, program of the tests, reason of ctest's last) in a checkout of its own: the status
    and the lines of tools/test."""
    for program in ("test", "skipped.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / program, tmp_path / "tools")
    for program in (tmp_path / ".venv" / "bin" / "python", tmp_path / "ctest"):
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "build").mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }

    def run(*parts, tests=_PYTEST, reason="nor those of CUDA"):
        (tmp_path / "test_some.py").write_text(tests)
        (tmp_path / "ctest").write_text(_CTEST.replace("{reason}", reason))
        path = f"{tmp_path}:{os.environ['PATH']}"
        result = processes.run(
            tmp_path / "tools" / "test", *parts, env={**environment, "PATH": path}
        )
        return result.returncode, result.stdout.splitlines()

    return run


def test_the_last_lines_count_the_reasons(run_tests):
    code, lines = run_tests("ctest", "pytest")
    assert code == 0, lines
    assert lines[-6:-1] == [
        "ctest: 1 skipped: needs a CUDA GPU",
        "ctest: 1 skipped: needs the headers of CUDA",
        "ctest: 100% tests passed, 0 tests failed out of 3",
        "pytest: 2 skipped: needs a CUDA GPU",
        "pytest: 1 skipped: needs two CUDA GPUs",
    ]
    assert lines[-1].startswith("pytest: ") and "1 passed, 3 skipped" in lines[-1]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("import pytest\npytest.importorskip('winnow_none')\n", "could not import 'winnow_none'"),
        ("import pytest\n@pytest.mark.skip(reason='has no cmake')\ndef test_a(): pass\n", "cmake"),
    ],
    ids=["a package is missing", "a program is missing"],
)
def test_a_skip_for_another_reason_is_a_failure(run_tests, before, said):
    code, lines = run_tests("pytest", tests=before + _PYTEST)
    (found,) = [line for line in lines if line.startswith("pytest: must not be skipped: ")]
    assert code == 1 and said in found
    assert lines[-1].startswith("pytest: ") and " in " in lines[-1]


def test_a_skip_of_ctest_for_another_reason_is_a_failure(run_tests):
    code, lines = run_tests("ctest", reason="cuobjdump is not there")
    assert "ctest: must not be skipped: B.B: cuobjdump is not there" in lines
    assert code == 1
