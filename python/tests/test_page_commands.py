"""Every command of every page: run here, run by another test, or marked with the reason why not."""

import os
import re
import sys
from pathlib import Path

import pytest
from processes import run
from test_pages import PAGES

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    r"\S*winnow|python3?|make|cmake|ctest|pip|compute-sanitizer|torchrun|docker|git|build/\S+"
)


def _without_comment(command):
    return re.sub(r"\s+#\s.*$", "", command).strip()


def commands(page):
    """Lines of the blocks of sh, and lines that are set in and begin with a program."""
    text = page.read_text()
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if _without_comment(line):
                yield _without_comment(line)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for line in re.findall(rf"^    ((?:\w+=\S+ )*(?:{PROGRAMS}) .*)$", text, re.MULTILINE):
        yield _without_comment(line)


ALL = sorted({(str(page.relative_to(ROOT)), c) for page in PAGES for c in commands(page)})

# Run below, as they stand.
RUN = [
    r"python -m winnow info",
    r"python -m winnow verify indexer::quantize",
    r"WINNOW_LOG=1 python -m winnow verify sparse_mla::forward --case bf16-all-rules",
    r"build/bin/winnow verify paged_xl::position_term",
    r"build/bin/winnow info",
]
# Run by other tests, which are named: of pytest FILE::test, of gtest Suite.Name, else one of ctest.
ELSEWHERE = {
    r"tools/setup pip|python3 -m venv .*|pip install -v \.": (
        "test_setup.py::test_the_documented_commands_install_where_python_is_managed",
    ),
    r"pip wheel \. .*|pip install --no-index dist/.*": (
        "test_page_commands.py::test_the_commands_without_a_network_build_here_and_install_there",
    ),
    r"mkdir calls|WINNOW_RECORD=calls .*|winnow replay calls/.*": (
        "test_page_commands.py::test_the_commands_for_records_run",
    ),
    r"make install .*": ("install", "example_first_call"),
    r"export PKG_CONFIG_PATH=.*|g\+\+ .*pkg-config.*": ("pkg_config",),
    r"cmake -S examples/train_indexer .*|cmake --build build/train|build/train/train_indexer": (
        "example_train_indexer",
    ),
    r"WINNOW_RENDEZVOUS=\$\(mktemp -d\) torchrun .* program.py": (
        "test_expert_meeting.py::test_the_documented_program_runs",
    ),
    r"torchrun .*": ("test_expert_layer.py::test_the_documented_program_runs",),
    r"export WINNOW_JOB=.*|for rank in .*": ("CommandLine.VerifyRunsOnRanksThatAreProcesses",),
    r"OMP_NUM_THREADS=1 python examples/finetune_dsa/finetune.py .*": (  # with fewer steps
        "test_transformers_example.py::test_the_example_learns_and_needs_less_memory",
    ),
    r"OMP_NUM_THREADS=1 python examples/train_v4/train.py": (  # with fewer steps
        "test_train_v4_example.py::test_the_example_learns_to_recall",
    ),
    r"OMP_NUM_THREADS=1 python examples/same_bits/same_bits.py": (  # with fewer tokens
        "test_same_bits_example.py::test_engine_and_trainer_have_the_same_bits",
    ),
    r"python examples/serve_dsa/serve.py .*": (
        "test_serve_example.py::test_every_step_equals_the_full_computation",
    ),
    r"python examples/serve_dsa/serve_v4.py": (
        "test_serve_example.py::test_v4_gets_the_tokens_of_transformers",
    ),
    r"cmake --build --preset dev --target simulator_forward_test": ("SimulatorForward",),
    r"build/dev/bin/simulator_forward_test --gtest_filter='Quick\*'": ("SimulatorForward",),
    r"python -m winnow.compat check site-packages/sglang": (
        "test_compat_check.py::test_the_command",
    ),
    # The folder by the one, torchrun by the other.
    r"PYTHONPATH=\$\(python -m winnow compat-path\) torchrun .*": (
        "test_deep_ep.py::test_the_folder_has_a_real_package",
        "test_expert_layer.py::test_the_documented_program_runs",
    ),
}
# Not run by a test.
NOT_RUN = {
    r"git clone .*": "the address is that of the reader's copy",
    r"sudo apt-get install .*": "test_release.py looks for each package",
    r"sudo dnf install .*|conda install .*": "CI has Debian alone; the page says so",
    r"docker .*": "CI has no Docker; test_release.py reads the Dockerfiles",
    r"pip install -v \. --config-settings cmake.define.WINNOW_(CUDA|TOOLS)=OFF": (
        "compiles for minutes; the wheel under test is built in this way"
    ),
    r"pip install torch==.* transformers==.*": "pyproject.toml pins both for the tests",
    r"compute-sanitizer .*": "wants a GPU",
    r"(WINNOW_VLLM=1 )?PYTHONPATH=\$\(python -m winnow\.compat path .*": (
        "wants an engine and a GPU; test_compat_check.py and test_vllm_plugin.py have the parts"
    ),
    r"make test": "it is what runs this",
    r"WINNOW_RENDEZVOUS=.* (mpirun|srun|torchrun .* --no-python) .*": (
        "CI has neither MPI nor SLURM; launch_environment_test.cc has their variables"
    ),
    r"make demo": "compiles for minutes; by hand in a fresh clone before a release",
    r"WINNOW_SIMULATOR_\w+=\S+ build/dev/bin/simulator_forward_test .*": (
        "repeats a failure, or shows reports: for a test that the reader chooses"
    ),
    r"cmake --preset dev|make try OP=\S+": "compiles for minutes; test_try.py looks at the parts",
    r".* --device cuda|.*sm100.*|.*simulator_record.*": "wants a GPU",
    r"cmake --preset release -DWINNOW_TESTS=ON -DWINNOW_CUDA=ON": "make test configures like this",
}


def _matches(patterns, command):
    return [pattern for pattern in patterns if re.fullmatch(pattern, command)]


@pytest.mark.parametrize(("page", "command"), ALL)
def test_every_command_is_run_or_marked(page, command):
    assert any(_matches(kind, command) for kind in (RUN, ELSEWHERE, NOT_RUN)), (
        f"{page}: say in python/tests/test_page_commands.py how this command is tested"
    )


def test_no_mark_is_left_over():
    every = [command for _, command in ALL]
    for pattern in (*RUN, *ELSEWHERE, *NOT_RUN):
        for part in re.split(r"\|(?![^(]*\))", pattern):
            assert any(re.fullmatch(part, command) for command in every), part


def _names_a_test(name):
    if "::" in name:
        file, function = name.split("::")
        return f"def {function}(" in (ROOT / "python" / "tests" / file).read_text()
    suite = re.compile(r"TESTS?(_F|_P)?\(" + r",\s*".join(name.split(".")) + "[,)]")
    if name[0].isupper():
        tests = (t for room in ("winnow", "tools") for t in (ROOT / room).rglob("*_test.cc"))
        return any(suite.search(test.read_text()) for test in tests)
    made = (ROOT / "examples" / "CMakeLists.txt").read_text()
    return f"add_test(NAME {name} " in made or f"winnow_{name.replace('_', '(', 1)} " in made


@pytest.mark.parametrize("name", sorted({name for names in ELSEWHERE.values() for name in names}))
def test_a_mark_names_a_test(name):
    assert _names_a_test(name)


def test_a_mark_without_a_test_is_found():
    names = ("test_setup.py::test_none", "Launch.None", "example_none", "launch")
    assert [name for name in names if _names_a_test(name)] == []


@pytest.mark.parametrize("command", [c for c in sorted({c for _, c in ALL}) if _matches(RUN, c)])
def test_a_command_runs(command, tmp_path):
    if command.startswith("build/bin/") and not (ROOT / "build/bin/winnow").exists():
        pytest.skip("has no build/bin/winnow")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = run(
        "sh", "-c", command, cwd=ROOT, add={"PATH": path, "OMP_NUM_THREADS": "1"}, check=True
    )
    if "WINNOW_LOG" in command:
        assert re.search(r"^winnow \S+ \[\d+\] sparse_mla::forward q=", result.stderr, re.M)


def test_the_commands_for_records_run(tmp_path):
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (block,) = re.findall(r"```sh\n(mkdir calls\n.*?)```", page, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "my_program.py").write_text(program)
    script = "set -e\n" + block.replace("calls/FILE.call", "calls/*.call")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = run("sh", "-c", script, cwd=tmp_path, add={"PATH": path}, check=True)
    assert result.stdout.count("the same bits") >= 2


def test_the_commands_without_a_network_build_here_and_install_there(tmp_path):
    """The package itself: here with the objects that `make test` has compiled, there into an
    environment that has nothing, not even pip, with an index that leads nowhere."""
    cache = ROOT / "build" / "release" / "CMakeCache.txt"
    if not cache.exists() or "WINNOW_PYTHON:BOOL=ON" not in cache.read_text():
        pytest.skip("has no build/release with the Python package")
    tests = re.search(r"^WINNOW_TESTS:BOOL=(\w+)", cache.read_text(), re.MULTILINE)[1]
    page = (ROOT / "docs" / "python.md").read_text()
    (block,) = re.findall(r"```sh\n(pip wheel .*?)```", page, re.DOTALL)
    here, there = (_without_comment(line) for line in block.splitlines())
    assert here.endswith(" -w dist")
    with_objects = (
        "-q --no-build-isolation --config-settings build-dir=build/release "
        f"--config-settings cmake.define.WINNOW_TESTS={tests}"
    )
    script = (
        f'set -e\npip() {{ "{sys.executable}" -m pip "$@" {with_objects}; }}\n'
        f"{here.replace('-w dist', f'-w {tmp_path}/dist')}\ncd {tmp_path}\n"
        f'"{sys.executable}" -m venv --without-pip there\n'
        f'pip() {{ "{sys.executable}" -m pip --python there/bin/python "$@"; }}\n'
        f"export PIP_INDEX_URL=http://127.0.0.1:9/\n{there}\n"
        "env -i PATH=/usr/bin:/bin there/bin/winnow verify paged_xl::append\n"
    )
    result = run(
        "sh", "-c", script, cwd=ROOT, add={"PIP_DISABLE_PIP_VERSION_CHECK": "1"}, check=True
    )
    assert re.search(r"\b[1-9]\d* passed, 0 failed", result.stdout), result.stdout
