#!/usr/bin/env python3
"""Prints what pyproject.toml pins, a requirement in each line: `requirements_of.py build test ...`,
where `build` is what builds the package and any other word an optional part."""

import sys
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())
for part in sys.argv[1:]:
    if part == "build":
        print(*project["build-system"]["requires"], sep="\n")
    else:
        print(*project["project"]["optional-dependencies"][part], sep="\n")
