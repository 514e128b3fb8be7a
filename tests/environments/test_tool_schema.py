"""Schemas of tools: those of transformers, without transformers."""

from collections.abc import Callable
from typing import Any, Literal, Optional, Union

import pytest
import tool_cases
from transformers.utils.chat_template_utils import get_json_schema

from rlightning.environments.tool_schema import convert_numbers, describe_tool, find_mistakes


def many(
    text: str,
    number: float,
    flag: bool,
    items: list[int],
    table: dict[str, float],
    either: int | str,
    choice: Literal["a", "b"],
    anything: Any,
    maybe: Optional[int] = None,  # noqa: UP045
    nested: list[dict[str, list[str]]] | None = None,
    old: Union[int, float] = 1,  # noqa: UP007
) -> str:
    """Do much.

    It has a second paragraph.

    Args:
        text: one.
        number: two (with brackets): and a colon.
        flag: three.
        items: four.
        table: five.
        either: six.
        choice: seven.
        anything: eight.
        maybe: nine.
        nested: ten,
            in two lines.
        old: eleven.

    Returns:
        Nothing of use.
    """
    return text


@pytest.mark.parametrize("function", [many, tool_cases.add])
def test_schema_is_that_of_transformers(function: Callable[..., Any]) -> None:
    theirs = get_json_schema(function)
    theirs["function"].pop("return", None)
    ours = describe_tool(function, "tools")
    assert ours == theirs


def test_methods_have_no_self() -> None:
    assert describe_tool(tool_cases.Counter.increase, "tools")["function"] == {
        "name": "increase",
        "description": "Increase it.",
        "parameters": {
            "type": "object",
            "properties": {"by": {"type": "integer"}, "name": {"type": "string"}},
            "required": ["by"],
        },
    }


GOOD = {
    "text": "a",
    "number": 1,
    "flag": True,
    "items": [1, 2.0],
    "table": {"a": 1.5},
    "either": "a",
    "choice": "b",
    "anything": None,
}


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({}, None),
        ({"maybe": None, "nested": [{"a": ["b"]}], "old": 2.5}, None),
        ({"text": 1}, "text is 1, and has to be of type string."),
        ({"flag": 1}, "flag is 1, and has to be of type boolean."),
        ({"number": True}, "number is True, and has to be of type number."),
        ({"number": None}, "number is None, and has to be of type number."),
        ({"items": [1, 1.5]}, "items[1] is 1.5, and has to be of type integer."),
        ({"items": "12"}, "items is '12', and has to be of type array."),
        ({"table": {"a": "b"}}, "table['a'] is 'b', and has to be of type number."),
        ({"either": 1.5}, "either is 1.5, and has to be of type integer or string."),
        ({"choice": "c"}, "choice is 'c', and has to be one of ['a', 'b']."),
        ({"choice": []}, "choice is [], and has to be one of ['a', 'b']."),
        ({"nested": [{"a": [1]}]}, "nested[0]['a'][0] is 1, and has to be of type string."),
        ({"more": 1}, "There is no argument 'more': it takes text, number, flag"),
    ],
)
def test_mistakes_in_arguments_are_found(changes: dict[str, Any], mistake: str | None) -> None:
    schema = describe_tool(many, "tools")["function"]["parameters"]
    found = find_mistakes(schema, GOOD | changes)
    assert found is None if mistake is None else str(found).startswith(mistake)
    assert find_mistakes(schema, {}) == "The argument text is missing."


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2.0, 2), ([1.0, 2.0], [1, 2]), ({"a": 3.0}, {"a": 3.0}), ([{"a": 3.0}], [{"a": 3.0}]), ("x", "x")],
)
def test_whole_numbers_are_ints_where_the_schema_has_no_floats(value: Any, expected: Any) -> None:
    def take(given: int | str | list[int] | list[dict[str, float]] | dict[str, float]) -> None:
        """Take.

        Args:
            given: anything.
        """

    schema = describe_tool(take, "take")["function"]["parameters"]
    converted = convert_numbers(schema, {"given": value})["given"]
    assert repr(converted) == repr(expected)
