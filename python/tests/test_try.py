"""`make try`: which tests belong to an operation, by tools/try and by the labels of CTest."""

import os
import re
import shutil
from pathlib import Path

import pytest
import readme
from processes import run

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    str(test.parent.relative_to(ROOT / "winnow")) for test in ROOT.glob("winnow/*/**/*_test.cc")
}
ROOMS |= {room.split("/")[0] for room in ROOMS}


@pytest.fixture
def attempt(tmp_path):
    """Runs tools/try with programs that say what they are asked, and know the rooms with tests."""
    targets = " ".join("tests-" + room.replace("/", "-") for room in ROOMS)
    for name, text in (
        ("cmake", 'echo "cmake $*"'),
        ("ctest", 'echo "ctest $*"'),
        ("ninja", f'for last; do :; done; case " {targets} " in *" $last "*) ;; *) exit 1 ;; esac'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return lambda *arguments: run(ROOT / "tools" / "try", *arguments, env=environment)


@pytest.mark.parametrize(
    "operation", [*readme.operations(), "indexer", "expert_parallel/transport"]
)
def test_an_operation_has_a_room_with_tests(operation, attempt):
    result = attempt(operation)
    assert result.returncode == 0, result.stderr
    build, test = result.stdout.splitlines()[-2:]
    (room,) = re.findall(r"-L \^(\S+)\(/\|\$\) -LE gpu$", test)
    assert build == "cmake --build --preset dev --target tests-" + room.replace("/", "-")
    family, _, name = operation.replace("::", "/").partition("/")
    assert room.split("/")[0] == family and room in ROOMS
    assert not name or room == f"{family}/{name}" or (ROOT / "winnow" / room / f"{name}.h").exists()


@pytest.mark.parametrize(
    ("given", "meant"),
    [("sparse_mla::foward", "; did you mean sparse_mla::forward?"), ("matmul", ""), ("", ""),
     ("a b; c", ""), ("device", "")],
)  # fmt: skip
def test_another_name_is_refused_with_the_operations(given, meant, attempt):
    result = attempt(given)
    assert result.returncode == 1
    assert result.stderr.startswith("try: OP: want an operation (indexer::topk, ")
    assert result.stderr.endswith(f'got "{given}"{meant}\n')


@pytest.mark.skipif(shutil.which("ctest") is None, reason="has no ctest")
@pytest.mark.parametrize(
    ("labels", "test"),
    [
        (["^sparse_mla/forward$", "^simulator$"], r"Quick/SimulatorForward\.Passes/\w+"),
        (["^sparse_mla/forward$", "^unit$"], r"Forward\w*\.\w+"),
        (["^indexer(/|$)", "^simulator$"], r"\w+/Simulator\w*Topk\w*\.Passes/\w+"),
        (["^machine_code$"], "descriptors_bad"),
        (["^kernels$"], "descriptors_good"),
        (["^program$"], r"CommandLine\.\w+"),
    ],
)
def test_tests_have_labels(labels, test):
    build = ROOT / "build" / "release"
    if not (build / "CTestTestfile.cmake").exists():
        pytest.skip("has no build/release with tests")
    asked = [part for label in labels for part in ("-L", label)]
    listed = run("ctest", "-N", *asked, cwd=build, check=True).stdout
    names = re.findall(r"Test +#\d+: (\S+)", listed)
    assert any(re.fullmatch(test, name) for name in names), listed[-500:]
