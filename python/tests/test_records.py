"""results/*.json: their schema, commits and commands, and the pages that are made from them."""

import copy
import functools
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import jsonschema
import pytest
from processes import forked, python, run

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(set((ROOT / "results").glob("*.json")) - {ROOT / "results" / "schema.json"})
SCHEMA = json.loads((ROOT / "results" / "schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@pytest.fixture
def records():
    """The program, as a module."""
    spec = importlib.util.spec_from_file_location("records", ROOT / "docs" / "records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries():
    for file in FILES:
        content = json.loads(file.read_text())
        yield from content.get("records", ())
        yield from content.get("verifications", ())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_fits_the_schema(file):
    wrong = VALIDATOR.iter_errors(json.loads(file.read_text()))
    assert [f"{error.json_path}: {error.message}" for error in wrong] == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: record.pop("commit"), "'commit' is a required property"),
        (lambda record: record.update(date="26.11.2026"), "does not match"),
        (lambda record: record["results"][0].update(seconds=0), "is not valid under any"),
        (lambda record: record["results"][0].update(speed=1), "'speed' was unexpected"),
        (lambda record: record.update(results=[]), "should be non-empty"),
    ],
)
def test_the_schema_refuses_what_is_wrong(change, said):
    record = next(copy.deepcopy(one) for one in entries() if "results" in one and "commit" in one)
    assert VALIDATOR.is_valid({"records": [record]})
    change(record)
    messages = []
    for error in VALIDATOR.iter_errors({"records": [record]}):
        messages += [error.message, *(part.message for part in error.context)]
    assert any(said in message for message in messages), messages


def test_every_commit_is_one_of_the_project():
    git = ["git", "-C", ROOT, "rev-parse", "--is-shallow-repository"]
    if not shutil.which("git") or run(*git).stdout != "false\n":
        pytest.skip("has no repository")
    commits = {one.get("commit") or one["recorded_in"] for one in entries()}
    for one in entries():
        commits |= set(re.findall(r"\bat ([0-9a-f]{7})\b", one.get("note", "")))
    asked = "".join(f"{commit}^{{commit}}\n" for commit in sorted(commits))
    made = run("git", "-C", ROOT, "cat-file", "--batch-check", input=asked, check=True)
    assert [line for line in made.stdout.splitlines() if " commit " not in line] == []


# What `python -m winnow bench` has beside the operations.
_OF_PYTHON = ("python", "transformers", "context_parallel")


def _options(*words):
    return set(re.findall(r"--[a-z-]+", forked("-m", "winnow", *words, "--help").stdout))


@functools.cache
def _built():
    """Programs of tests and examples, and every word of the lists that build them."""
    room = ROOT / "winnow"
    made = (*room.rglob("CMakeLists.txt"), *room.rglob("*.cmake"))
    built = set(re.findall(r"\w+", "".join(path.read_text() for path in made)))
    built |= {path.stem for end in ("test", "soak") for path in room.rglob(f"*_{end}.cc")}
    built |= {path.name for path in (ROOT / "python" / "tests").glob("test_*.py")}
    return built | {path.name for path in (ROOT / "examples").iterdir()}


def unknown(command, cases, options):
    """What the project does not have of a command: a program, an option, an operation, a case."""
    ranks = r"mpirun -n \d+|torchrun (--standalone )?--nproc-per-node \d+"
    around = rf"(\w+=\S+|compute-sanitizer --tool \w+|{ranks}) "
    command = re.sub(rf"^({around})+", "", command)
    words = re.sub(r"^(python )?-m winnow", "winnow", command).split()
    name, arguments = words[0], words[1:]
    if name == "make":
        return (
            [] if re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M) else words
        )
    if name in ("python", "torchrun") or name.startswith("tools/"):
        paths = [word for word in words if "/" in word]
        return [path for path in paths if not (ROOT / path).exists()] or ([] if paths else words)
    if name == "winnow":
        verb, *rest = arguments
        known = {operation for operation, _ in cases}
        known |= {operation.split("::")[0] for operation in known} | {*_OF_PYTHON}
        offered = options[rest[0]] if rest and rest[0] in _OF_PYTHON else options[verb]
        wrong = [word for word in rest if word.startswith("--") and word not in offered]
        if rest and not rest[0].startswith("--") and rest[0] not in known:
            wrong.append(rest[0])
        if "--case" in rest:
            case = rest[rest.index("--case") + 1]
            wrong += [case] * (case not in {name for _, name in cases})
        return wrong
    built = _built()
    return [word for word in words if word == name or word.endswith("_test") if word not in built]


@pytest.fixture(scope="module")
def program():
    """The cases that `winnow verify` has, {(operation, case)}, and the options of each command."""
    made = python("-m", "winnow", "verify", "--list", "--json", check=True)
    cases = {(one["operation"], one["case"]) for one in json.loads(made.stdout)["cases"]}
    options = {verb: _options(verb) for verb in ("bench", "verify", "demo")}
    return cases, options | {name: _options("bench", name) for name in _OF_PYTHON}


def test_every_command_is_one_that_the_project_has(program):
    commands = {one["command"] for one in entries() if ": test_" not in one["command"]}
    wrong = {command: unknown(command, *program) for command in sorted(commands)}
    assert {command: words for command, words in wrong.items() if words} == {}


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("winnow bench sparse_mla::none", "sparse_mla::none"),
        ("mpirun -n 2 winnow bench indexer --fast", "--fast"),
        ("winnow verify sparse_mla --case nothing", "nothing"),
        ("make none", "none"),
        ("none_gpu_test", "none_gpu_test"),
        ("python tools/none sparse_mla", "tools/none"),
    ],
)
def test_a_command_that_the_project_lacks_is_found(command, wrong, program):
    assert wrong in unknown(command, *program)


def test_pages_and_pictures_are_made_from_the_records(records):
    for path, text in records.outputs().items():
        assert path.read_text() == text, f"{path}: run python3 docs/records.py"


def test_a_new_report_takes_the_place_of_older_results(records, monkeypatch, tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results")
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    command = ["winnow", "bench", "expert_parallel::layout"]
    made = python(
        "-m", *command, "--device", "cpu", "--seconds", "0.001", "--json", "--repetitions", "1",
        check=True,
    )  # fmt: skip
    (tmp_path / "report.json").write_text(made.stdout)
    before = [one for one in records.read()[0] for one in one["results"]]
    (where,) = {
        record["where"]
        for record in records.read()[0]
        if any(one["operation"] == "expert_parallel::layout" for one in record["results"])
    }
    options = ["add", str(tmp_path / "report.json"), "--commit", "49db1c0"]
    options += ["--command", " ".join(command), "--where", where]
    monkeypatch.setattr(sys, "argv", ["records.py", *options])
    monkeypatch.setattr(records, "outputs", dict)
    records.main()
    content = json.loads((tmp_path / "results" / "cpu.json").read_text())
    VALIDATOR.validate(content)
    assert len([one for one in records.read()[0] for one in one["results"]]) == len(before)
    assert content["records"][-1]["results"] == json.loads(made.stdout)["results"]
    assert records.outputs() == {}


def test_results_of_the_portable_backend_stand_beside_the_others(records):
    record = next(one for one in entries() if "results" in one)
    result = record["results"][0]
    portable = {**result, "backend": "cuda", "ceiling": "mma.sync product", "ratio": 0.5}
    assert VALIDATOR.is_valid({"records": [{**record, "results": [result, portable]}]})
    assert records._key(record, portable) != records._key(record, result)
    assert records._briefly(portable).startswith(f"{result['benchmark']}, cuda ")
    assert records._of_ceiling([[portable]]) == "50 % of a product with mma.sync"


def test_a_verification_is_added(records, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setattr(records, "outputs", dict)
    report = tmp_path.parent / f"{tmp_path.name}.report"
    command = "winnow verify expert_parallel::layout"
    made = python("-m", *command.split(), "--json", check=True)
    report.write_text(made.stdout)
    for commit in ("bae4f2f", "49db1c0"):  # the second in the place of the first
        options = [str(report), "--commit", commit, "--command", command, "--where", "CPU"]
        monkeypatch.setattr(sys, "argv", ["records.py", "add", *options])
        records.main()
    content = json.loads((tmp_path / "verification.json").read_text())
    VALIDATOR.validate(content)
    (entry,) = content["verifications"]
    assert entry["commit"] == "49db1c0" and entry["failed"] == 0
    assert entry["passed"] == json.loads(made.stdout)["passed"] > 0
