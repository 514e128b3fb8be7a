"""Private names of jsonargparse that have no public equivalent; tests/test_library_internals.py checks each."""

from argparse import Action, ArgumentParser
from collections.abc import Sequence

from jsonargparse._loaders_dumpers import get_yaml_default_loader  # unlike PyYAML's loader, it reads 1e-5 as a number

__all__ = ["get_yaml_default_loader", "hint_of", "keep_text", "parser_actions"]


def parser_actions(parser: ArgumentParser) -> Sequence[Action]:
    """Return the argparse actions of a parser's arguments, in order."""
    return parser._actions


def hint_of(action: Action) -> object:
    """Return the type hint of an argument defined by jsonargparse; None for other arguments."""
    return vars(action).get("_typehint")


def keep_text(action: Action) -> None:
    """Have an argument accept the name of an existing file as a text, rather than read the file as configuration."""
    vars(action)["_enable_path"] = False
