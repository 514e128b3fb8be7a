"""The errors that the endpoint returns to clients, in the form of the API that the client uses."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlightning.errors import ConfigError
from rlightning.foreign_text import describe_error
from rlightning.python_values import JsonObject

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
"""OpenAI's and Anthropic's name of an error by its HTTP status; every other status is a server error."""


class EndpointFullError(Exception):
    """The endpoint has its maximum number of requests or sessions; the trajectory that needs another one fails."""


class APIError(Exception):
    """The endpoint rejects a request, with an HTTP status; the trajectory is unchanged."""

    def __init__(self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    def to_openai(self) -> JsonObject:
        """Return the error's body in OpenAI's form."""
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_anthropic(self) -> JsonObject:
        """Return the error's body in Anthropic's form."""
        kind = "request_too_large" if self.status == 413 else TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Context manager that raises an APIError about the request field ``what`` if parsing or rendering it fails."""
    try:
        yield
    except ConfigError as error:
        raise APIError(error.line, param=what) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise APIError(f"{what}: it is not of the API's form ({describe_error(error)}).", param=what) from error
