"""Runs ``main()`` of a module of this rlightning in an interpreter in which rlightning is not installed.

Of the folder that contains the package, only the package itself can be imported::

    python bootstrap.py rlightning.environments.worker ARGUMENT ...
"""

import importlib
import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run ``main()`` of the module that the first argument names, with the remaining arguments."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    if "rlightning" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "rlightning", folder.parent / "__init__.py", submodule_search_locations=[str(folder.parent)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["rlightning"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    del sys.argv[0]
    importlib.import_module(sys.argv[0]).main()


if __name__ == "__main__":
    main()
