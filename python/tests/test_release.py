"""Workflows, issue forms, Dockerfiles: as far as they can be tested where they cannot run."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from processes import run

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))


def _commands(workflow):
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        for step in job["steps"]:
            if "run" in step:
                yield step["run"]


def missing_references(command):
    """Verbs of make, scripts and files of the checkout that a command names and that are not."""
    missing = []
    for verb in re.findall(r"(?:^|&& *|^ *)make ([a-z-]+)", command, re.MULTILINE):
        if run("make", "-n", verb, cwd=ROOT).returncode != 0:
            missing.append(f"make {verb}")
    for name in re.findall(r"(?<![\w/.-])((?:tools|python|\.ci|docs|docker)/[\w./-]+)", command):
        if not (ROOT / name).exists():
            missing.append(name)
    for part in re.findall(r"tools/setup((?: [a-z]+)+)", command):
        known = re.search(r"unknown part '\$extra' \((.*?)\)", (ROOT / "tools/setup").read_text())
        missing += [f"setup {p}" for p in part.split() if p not in known[1].split(", ")]
    return missing


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_what_there_is(workflow):
    text = yaml.safe_load(workflow.read_text())
    assert text["name"] == workflow.stem and text["permissions"] and True in text  # `on:`
    for name, job in text["jobs"].items():
        assert job["runs-on"] and job["steps"], name
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(text["jobs"])
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    commands = list(_commands(workflow))
    assert commands and [m for c in commands for m in missing_references(c)] == []
    for command in commands:
        script = re.sub(r"\$\{\{.*?\}\}", "X", command)
        assert run("bash", "-n", input=script).returncode == 0, command


_FULL = re.compile(r"[0-9a-f]{40}")


def pinned_by_name(text):
    """The actions and foreign checkouts of a workflow's text that a tag or branch names, which
    whoever owns it can move; and those whose commit has no version beside it."""
    found = re.findall(r"^[ -]*uses: *(\S+)(.*)$", text, re.MULTILINE)
    found += re.findall(r"\b(ref: *[^\s,}]+)(.*)$", text, re.MULTILINE)
    return [
        what
        for what, rest in found
        if not what.startswith("./")
        and not (
            _FULL.fullmatch(re.split("@|: *", what)[-1]) and re.fullmatch(r" *# v\d[\d.]*", rest)
        )
    ]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_what_a_workflow_runs_of_others_is_pinned_by_commit(workflow):
    text = workflow.read_text()
    steps = [s for job in yaml.safe_load(text)["jobs"].values() for s in job["steps"]]
    assert text.count("uses:") == sum("uses" in step for step in steps) > 0
    assert pinned_by_name(text) == []


def test_a_pin_that_can_move_is_found():
    commit = "0123456789abcdef" * 2 + "01234567"
    text = f"""
      - uses: a/b@v4
      - uses: a/b@release/v1  # v1
      - uses: a/b@{commit[:7]}  # v4.2.2
      - uses: a/c@{commit}
        with: {{repository: d/e, ref: v1.7.1, path: f}}
      - uses: a/b@{commit}  # v4.2.2
        with:
          ref: {commit}  # v1.7.1
      - uses: ./here
    """
    found = ["a/b@v4", "a/b@release/v1", f"a/b@{commit[:7]}", f"a/c@{commit}", "ref: v1.7.1"]
    assert pinned_by_name(text) == found


# What GitHub accepts, as check-jsonschema has it.
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": [form for form in FORMS if form.stem != "config"],
    "github-issue-config": [form for form in FORMS if form.stem == "config"],
}


def _lint(schema, *files):
    linter = Path(sys.executable).parent / "check-jsonschema"
    if not linter.exists():
        pytest.skip("has no check-jsonschema: `tools/setup wheels` installs it")
    command = [linter, "--builtin-schema", f"vendor.{schema}", *files]
    return run(*command)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_linter_accepts_what_github_reads(schema):
    result = _lint(schema, *SCHEMAS[schema])
    assert result.returncode == 0, result.stdout


def test_a_linter_refuses_a_workflow_with_a_mistake(tmp_path):
    text = WORKFLOWS[0].read_text()
    assert "runs-on:" in text
    (tmp_path / "bad.yml").write_text(text.replace("runs-on:", "run-on:"))
    assert _lint("github-workflows", tmp_path / "bad.yml").returncode == 1


def test_the_choices_of_the_gpu_workflow_are_verbs_of_make():
    (path,) = (w for w in WORKFLOWS if w.stem == "gpu")
    inputs = yaml.safe_load(path.read_text())[True]["workflow_dispatch"]["inputs"]
    assert [
        m for verb in inputs["target"]["options"] for m in missing_references(f"make {verb}")
    ] == []


def test_a_missing_reference_is_found():
    command = "make nothing-such\ntools/nothing x && tools/setup pip nonsense\nmake docs"
    assert missing_references(command) == ["make nothing-such", "tools/nothing", "setup nonsense"]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_complete(form):
    text = yaml.safe_load(form.read_text())
    if form.stem == "config":
        assert text == {"blank_issues_enabled": False}
        return
    assert text["name"] and text["description"]
    fields = [field for field in text["body"] if field["type"] != "markdown"]
    assert fields and all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_names_what_there_is(dockerfile):
    text = re.sub(r"\\\n", " ", dockerfile.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    known = "FROM RUN WORKDIR COPY ENV CMD".split()
    assert lines[0].startswith("FROM ") and {line.split()[0] for line in lines} <= set(known)
    for line in lines:
        if line.startswith("RUN "):
            command = line.removeprefix("RUN ")
            assert run("bash", "-n", input=command).returncode == 0, line
            assert missing_references(command) == []
    assert missing_references(dockerfile.read_text().replace("#   docker", "docker")) == []


def test_the_development_image_has_what_setup_would_install():
    setup = (ROOT / "tools" / "setup").read_text()
    wanted = re.search(r'libraries="(.*?)"\npackages="(.*?) \$libraries"', setup, re.DOTALL)
    image = (ROOT / "docker" / "Dockerfile.development").read_text()
    packages = {*wanted[1].split(), *wanted[2].split()}
    assert {p for p in packages if not re.search(rf"\b{re.escape(p)}(?![\w-])", image)} == set()


@pytest.mark.skipif(shutil.which("apt-cache") is None, reason="has no apt")
def test_the_packages_of_debian_exist():
    page = (ROOT / "docs" / "install.md").read_text()
    (command,) = re.findall(r"sudo apt-get install (.*?)```", page, re.DOTALL)
    names = [name for name in command.replace("\\\n", " ").split() if not name.startswith("-")]
    shown = run("apt-cache", "show", *names)
    if not re.search("^Package: libeigen3-dev$", shown.stdout, re.MULTILINE):
        pytest.skip("apt has no lists of packages")
    found = set(re.findall(r"^Package: (\S+)$", shown.stdout, re.MULTILINE))
    assert set(names) - found == set()
