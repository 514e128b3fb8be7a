"""Checks the wheel and the sdist in a folder: what is in them, and that the installed package imports."""

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path


def check_wheel(wheel: Path) -> None:
    """The callbacks are inside the package, and nowhere else."""
    names = zipfile.ZipFile(wheel).namelist()
    assert "rlightning/callbacks/__init__.py" in names, f"{wheel.name} has no rlightning/callbacks"
    assert "rlightning/py.typed" in names, f"{wheel.name} has no rlightning/py.typed"
    strays = [n for n in names if not n.startswith(("rlightning/", "rlightning-"))]
    assert not strays, f"{wheel.name} would install more than rlightning: {strays}"
    assert len(names) == len(set(names)), f"{wheel.name} has files twice"


def check_sdist(sdist: Path) -> None:
    """Everything that git has is there, but for the link and the CI's own files."""
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    wanted = {n for n in tracked if n and n != "rlightning/callbacks" and not n.startswith(".ci/")}
    missing = sorted(wanted - names)
    assert not missing, f"{sdist.name} lacks {missing}"


def check_install(wheel: Path, folder: Path) -> None:
    """The wheel installs, and its callbacks import, away from the repository.

    Dependencies come from this environment, by path: installing them a second time would take minutes.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel.resolve()], check=True)
    [site] = [p for p in sys.path if p.endswith("site-packages")]
    probe = (
        "import rlightning.callbacks, sys; "
        "assert rlightning.__file__.startswith(sys.prefix), rlightning.__file__; "
        "rlightning.callbacks.Throughput; assert 'vllm' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": site}
    subprocess.run([python, "-P", "-c", probe], check=True, cwd=folder, env=environment)
    subprocess.run([folder / "bin" / "rlightning", "--version"], check=True, cwd=folder)


def main() -> None:
    """Check the one wheel and the one sdist in the folder that the command line names."""
    folder = Path(sys.argv[1])
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_wheel(wheel)
    check_sdist(sdist)
    with tempfile.TemporaryDirectory() as place:
        check_install(wheel, Path(place))


if __name__ == "__main__":
    main()
