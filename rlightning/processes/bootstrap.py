"""Runs a module of the rlightning that this file belongs to, in an interpreter that has none installed.

Only the package itself is found in its folder, none of what lies beside it::

    python bootstrap.py rlightning.environments.worker ARGUMENT ...
"""

import importlib.util
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module that the first argument names; the others are its own."""
    package = Path(__file__).resolve().parent.parent
    spec = importlib.util.spec_from_file_location(
        "rlightning", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    sys.modules["rlightning"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
