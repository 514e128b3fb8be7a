"""Imports the names of a package when they are first accessed: importing the package itself is fast, and needs less."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name


def lazy_import(package: str, files: Mapping[str, str]) -> Callable[[str], object]:
    """Return a package's ``__getattr__``, which imports a name from its module on first access.

    Args:
        package: the package's dotted path.
        files: for each name, the module in the package that defines the name.
    """

    def import_name(name: str) -> object:
        if name not in files:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return resolve_name(f"{package}.{files[name]}:{name}")

    return import_name
