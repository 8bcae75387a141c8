"""`python -m winnow`: what Python adds to the program."""

import json
import re
import subprocess
import sys

import pytest
import winnow.__main__
from processes import python
from readme import asked


def test_the_cost_of_a_call_is_reported(monkeypatch, capsys):
    # Few calls: in short runs, which a busy machine leaves undisturbed at times.
    monkeypatch.setattr("winnow.call_cost._CALLS", 10)
    monkeypatch.setattr("winnow.call_cost._RUNS", 50)
    monkeypatch.setattr(sys, "argv", ["winnow", "bench", "python", "--json"])
    with pytest.raises(SystemExit) as end:
        winnow.__main__.main()
    assert end.value.code == 0
    rows = json.loads(capsys.readouterr().out)
    names = [row["benchmark"] for row in rows]
    first = names.index("flash_mla_sparse_fwd")
    assert names[first - 1] == "torch operator, recorded" and len(names[first:]) == 14
    assert all(row["target_seconds"] in (5e-6, 10e-6, 25e-6) for row in rows)
    # Ten times the target: finds a copy or a second parse, not a busy machine.
    assert all(0 < row["seconds"] < 10 * row["target_seconds"] for row in rows), rows


@pytest.mark.parametrize(
    ("arguments", "costs"),
    [
        ([], True),
        (["--seconds", "0.1", "--device", "cpu"], True),
        (["sparse_mla"], False),
        (["--device", "cpu", "paged_xl::append"], False),
        (["--name", "one"], False),
        (["--help"], False),
        (["--nonsense"], False),
    ],
)
def test_bench_shows_the_cost_of_a_call_beside_the_operations(
    arguments, costs, tmp_path, monkeypatch, capfd
):
    """The program is replaced by one that prints its arguments, the measurement by two rows."""
    program = tmp_path / "winnow"
    program.write_text(
        "#!/bin/sh\n"
        'for a in "$@"; do [ "$a" = --nonsense ] && exit 2; done\n'
        'for a in "$@"; do [ "$a" = --json ] && echo "{\\"results\\": [1]}" && exit 0; done\n'
        'echo "program $@"\n'
    )
    program.chmod(0o755)
    row = {"operation": "python", "benchmark": "a", "seconds": 2e-6, "target_seconds": 1e-5}
    rows = [{**row, "reached": True}, {**row, "seconds": 2e-5, "reached": False}]
    monkeypatch.setattr("winnow.__main__._PROGRAM", program)
    monkeypatch.setattr("winnow.call_cost.measure", lambda: rows)
    status = winnow.__main__._bench(arguments)
    output = capfd.readouterr().out
    assert status == (2 if "--nonsense" in arguments else 0)
    assert ("program bench" in output) == (status == 0)
    assert ("2.00 us  10.0 us reached" in output and "20.00 us  10.0 us MISSED" in output) == costs
    assert winnow.__main__._bench([*arguments, "--check"]) == (1 if costs else status)
    capfd.readouterr()
    winnow.__main__._bench([*arguments, "--json"])
    if status == 0:
        assert json.loads(capfd.readouterr().out)["results"] == ([1, *rows] if costs else [1])


def test_info_has_the_backends_of_the_library():
    """A backend without a kernel is refused with the list of those that have one."""
    info = json.loads(python("-m", "winnow", "info", "--json").stdout)
    for one in info["operations"]:
        name, dtype = asked(one["name"])
        for backend in ("sm100", "sm90", "cuda", "cpu"):
            reason = winnow.supports(name, dtype=dtype, backend=backend).reason
            lacks = "one that implements this operation" in reason
            assert lacks == (backend not in one["backends"]), (one, backend, reason)


def test_info_says_which_operations_run_on_this_machine():
    """As a call would find it, on tensors of the CPU and of a GPU; and so does the table."""
    info = json.loads(python("-m", "winnow", "info", "--json").stdout)
    shown = python("-m", "winnow", "info").stdout
    lines = {line.split("  ")[0]: line for line in shown.splitlines() if "::" in line[:32]}
    assert len(info["operations"]) == len(lines) == 21
    for one in info["operations"]:
        name, dtype = asked(one["name"])
        _, cpu, gpu, summary = re.split(" {2,}", lines[one["name"]])
        assert summary == one["summary"]
        for device, cell in (("cpu", cpu), ("cuda", gpu)):
            said = one["cpu" if device == "cpu" else "gpu"]
            support = winnow.supports(name, dtype=dtype, device=device)
            assert said["backend"] == (support.backend or ""), (one, support)
            assert support.reason.endswith(said["reason"]), (one, support)
            number = re.fullmatch(r"no (\(\d+\))", cell)
            if support:
                assert cell == said["backend"] and said["reason"] == ""
            else:
                assert said["reason"] and f"{number[1]} {said['reason']}" in shown


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("compat_path", "compat-path"),
        ("bench pyton", "python"),
        ("bench transformer", "transformers"),
        ("bench context-parallel", "context_parallel"),
        ("bench expert_paralel", "expert_parallel"),
        ("verfy", "verify"),
        ("bench sparse_mla::foward", "sparse_mla::forward"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest(arguments, meant):
    result = python("-m", "winnow", *arguments.split())
    assert result.returncode == 2
    assert result.stderr.startswith("winnow: ")
    assert result.stderr.endswith(f'"{arguments.split()[-1]}"; did you mean {meant}?\n')


def test_what_compat_path_does_not_take_is_refused():
    result = python("-m", "winnow", "compat-path", "deep_gemm")
    assert result.returncode == 2 and not result.stdout
    assert result.stderr == 'winnow: compat-path: want no argument, got "deep_gemm"\n'


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_has_what_python_adds(arguments):
    result = python("-m", "winnow", *arguments)
    assert result.returncode == (0 if arguments else 2)
    shown = result.stdout if arguments else result.stderr
    for command in ("winnow verify", "bench python", "bench transformers", "compat-path"):
        assert command in shown


@pytest.mark.parametrize("output", ["> /dev/full", ">&-"])
@pytest.mark.parametrize("arguments", ["info", "compat-path"])  # the program's, and Python's
def test_lost_output_is_an_error_of_the_system(arguments, output):
    command = f"{sys.executable} -m winnow {arguments} {output}"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=250)
    assert result.returncode == 4, result.stderr
    assert "winnow: standard output: the output is incomplete: " in result.stderr
