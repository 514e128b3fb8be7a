"""The endpoint's server: it authenticates clients, limits the size of requests, and answers them on one event loop."""

import asyncio
import contextlib
import hmac
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from rlightning import rpc
from rlightning.environments.endpoint import anthropic_api, openai_api, responses_api
from rlightning.environments.endpoint.address import find_address
from rlightning.environments.endpoint.asgi import ClientGoneError, Receive, Request, Send, send_json
from rlightning.environments.endpoint.errors import APIError, EndpointFullError
from rlightning.environments.endpoint.parameters import ALLOWABLE, TRUNCATION
from rlightning.environments.endpoint.session import Session
from rlightning.environments.endpoint.shared_key import HEADER, SharedKey
from rlightning.environments.endpoint.streaming import Emit, Event, Reply
from rlightning.environments.environment import LIMIT_TEXT, LimitReachedError, is_limit
from rlightning.environments.policy import RecordedPolicy, as_recorded
from rlightning.errors import ConfigError, check_rules
from rlightning.foreign_text import cut_line, describe_error
from rlightning.python_values import JsonObject

log = logging.getLogger(__name__)

ANTHROPIC = "/v1/messages"
MODELS = "/v1/models"
Route = Callable[[Session, JsonObject, Emit], Awaitable[Reply]]
ROUTES: Mapping[str, Route] = {
    "/v1/chat/completions": openai_api.complete_chat,
    "/v1/completions": openai_api.complete_text,
    "/v1/responses": responses_api.respond,
    ANTHROPIC: anthropic_api.create_message,
    f"{ANTHROPIC}/count_tokens": anthropic_api.count_tokens,
    "/inference/v1/generate": openai_api.generate_tokens,
}
LOOPBACK = "127.0.0.1"
KEEP_ALIVE_SECONDS = 120
"""Seconds that a client's idle connection stays open: tools may take long between two requests."""
CLOSE_SECONDS = 5.0
MAX_CONNECTIONS = 4096
"""Default maximum number of concurrent requests."""
MAX_REQUESTS = 64
"""Default maximum number of concurrent requests of a session."""
MAX_SESSIONS = 16384
"""Default maximum number of concurrent sessions."""
SPARE_CONNECTIONS = 1024
"""Idle and unauthenticated connections that are accepted beyond as many as there may be requests."""


class Endpoint:
    """A server of OpenAI's and Anthropic's APIs, on the event loop that starts it.

    Each trajectory has a session with its own key, which records what its requests sample.

    Args:
        host: address to listen at; by default only programs on this host can connect. ``0.0.0.0`` for all addresses.
        port: port to listen at; 0 for any free port.
        advertised_host: name or address that is given to agents, such as ``host.docker.internal`` for containers; None
            for ``host``, or, if that means all addresses, the one from which this host connects to others.
        keeps_reasoning: whether later turns keep the reasoning of earlier ones in the policy's context, so that a
            trajectory stays one branch. Otherwise the chat template decides, as in other servers.
        ignored: parameters of requests, such as ``top_p``, that are ignored rather than refused if unsupported.
        allowed: parameters of requests that are applied rather than refused: ``top_p``, ``top_k`` and ``min_p``, to
            which the trainer's distributions are truncated too, and ``response_format``, which its log-probabilities do
            not include.
        max_request_bytes: maximum bytes of a request's body.
        max_connections: maximum number of concurrent requests of all sessions, each of which takes a connection. One
            more fails its trajectory, whatever the agent makes of the response (503). The server accepts
            ``max_idle_connections`` beyond these.
        max_requests: maximum number of concurrent requests of a session.
        max_sessions: maximum number of concurrent sessions; a trajectory that needs another one fails.

    Attributes:
        url: URL of the server, without a path; available after :meth:`start`.
    """

    def __init__(
        self,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        advertised_host: str | None = None,
        keeps_reasoning: bool = True,
        ignored: Iterable[str] = (),
        allowed: Iterable[str] = (),
        max_request_bytes: int = 16 << 20,
        max_connections: int = MAX_CONNECTIONS,
        max_requests: int = MAX_REQUESTS,
        max_sessions: int = MAX_SESSIONS,
    ) -> None:
        check_rules(
            {
                f"endpoint.port={port} must be from 0 to 65535": 0 <= port < 1 << 16,
                f"endpoint.max_request_bytes={max_request_bytes} must be at least 1": max_request_bytes >= 1,
                f"endpoint.max_connections={max_connections} must be at least 1": max_connections >= 1,
                f"endpoint.max_requests={max_requests} must be at least 1": max_requests >= 1,
                f"endpoint.max_sessions={max_sessions} must be at least 1": max_sessions >= 1,
            }
        )
        self.host, self.port, self.advertised_host = host, port, advertised_host
        self.keeps_reasoning = keeps_reasoning
        self.ignored, self.allowed = frozenset(ignored), frozenset(allowed)
        if self.allowed.difference(ALLOWABLE):
            raise ConfigError(f"endpoint.allowed={sorted(self.allowed)} may have {', '.join(ALLOWABLE)} alone.")
        self.max_request_bytes, self.max_connections = max_request_bytes, max_connections
        self.max_requests, self.max_sessions = max_requests, max_sessions
        self._num_requests = 0
        self._sessions: dict[str, Session] = {}
        self._shared_keys: dict[str, SharedKey] = {}
        self._serving: tuple[Any, asyncio.Task[None]] | None = None
        self._has_refused = False
        self.url = ""

    @property
    def truncates(self) -> bool:
        """Whether requests may truncate the distribution of their tokens in other ways than the run."""
        return not self.allowed.isdisjoint(TRUNCATION)

    @property
    def max_idle_connections(self) -> int:
        """Number of connections without a request that are accepted beside ``max_connections`` requests."""
        return self.max_connections + SPARE_CONNECTIONS

    async def start(self) -> None:
        """Start to listen, if not listening already; raises a ConfigError if that fails."""
        if self._serving is None:
            uvicorn = _import_server()
            listener = self._bind()
            config = uvicorn.Config(
                self._serve,
                log_config=None,
                access_log=False,
                lifespan="off",
                interface="asgi3",
                ws="none",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                limit_concurrency=self.max_connections + self.max_idle_connections,  # uvicorn's 503 fails no session
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)
            server.capture_signals = contextlib.nullcontext  # the trainer handles signals
            self._serving = server, asyncio.ensure_future(server.serve([listener]))
            log.info("Agents reach the policy at %s.", self.url)
        server, task = self._serving
        while not server.started:
            if task.done():
                task.result()
            await asyncio.sleep(0.005)

    def _bind(self) -> socket.socket:
        listener = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self.host, self.port))
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"endpoint.host={self.host}, endpoint.port={self.port} cannot be listened at: {error.strerror}. Give "
                "an address of this host; port 0 takes a free one."
            ) from error
        self.url = rpc.make_url(self.advertised_host or find_address(self.host), listener.getsockname()[1], "http")
        return listener

    async def close(self) -> None:
        """Stop the server and cancel its requests. May be called twice."""
        serving, self._serving = self._serving, None
        if serving is None:
            return
        server, task = serving
        for session in list(self._sessions.values()):
            session.close()
        server.should_exit = server.force_exit = True
        _, pending = await asyncio.wait([task], timeout=CLOSE_SECONDS)
        for one in pending:
            one.cancel()

    @contextlib.asynccontextmanager
    async def open(self, policy: RecordedPolicy) -> AsyncIterator[Session]:
        """Context manager that serves the requests of one trajectory; yields its session, which has its own API key.

        Raises:
            EndpointFullError: there are ``max_sessions`` sessions.
            TypeError: the policy is that of an environment in a worker process.
            LimitReachedError: the caller failed after a response said that a sequence has its maximum length.
            Exception: sampling from the policy failed, even if the caller caught that error.
        """
        await self.start()
        if len(self._sessions) >= self.max_sessions:
            raise EndpointFullError(
                f"The endpoint has environment.endpoint.max_sessions={self.max_sessions} sessions. Raise it, or run "
                "fewer trajectories at once."
            )
        session = Session(
            as_recorded(policy), keeps_reasoning=self.keeps_reasoning, ignored=self.ignored, allowed=self.allowed
        )
        self._sessions[session.id] = session
        try:
            yield session
        except Exception as error:
            ended_there = session.has_reached_limit and is_limit(error) and not isinstance(error, LimitReachedError)
            if ended_there and not session.failure.done():
                raise LimitReachedError(f"The agent ended there: {describe_error(error)}") from error
            if not session.failure.done():
                raise
        finally:
            del self._sessions[session.id]
            session.close()
        if session.failure.done():
            raise session.failure.result()

    def share_key(self) -> SharedKey:
        """Return a new API key for the requests of several sessions; each request names its session in a header."""
        shared = SharedKey()
        self._shared_keys[shared.id] = shared
        return shared

    async def _serve(self, scope: JsonObject, receive: Receive, send: Send) -> None:
        """Answer a request; the ASGI application."""
        request = Request(scope, receive)
        is_reading = request.method in ("GET", "HEAD") and request.path == MODELS
        route = ROUTES.get(request.path) if request.method == "POST" else None
        session = None
        try:
            if route is None and not is_reading:
                place = f"{request.method} {request.path}"
                raise APIError(f"There is no {place}; there are {', '.join((*ROUTES, MODELS))}.", 404)
            session = await self._authenticate(request.headers, is_reading=is_reading)
            with self._counting(session):
                if route is None:
                    await send_json(send, openai_api.list_models(session))
                else:
                    body = await request.read_json(self.max_request_bytes)
                    await self._run(route, session, body, request, send)
        except APIError as error:
            if session is not None and error.status < 500:
                self._count_refusal(session, error)
            _, shape = _error_event(error, request.path)
            # The SDKs repeat requests after a server error, but here the error has ended the trajectory.
            is_over = error.status >= 500
            await send_json(send, shape, error.status, {b"x-should-retry": b"false"} if is_over else None)
        except ClientGoneError:
            return  # it gets no response

    @contextlib.contextmanager
    def _counting(self, session: Session) -> Iterator[None]:
        """Context manager that counts an authenticated request.

        Raises an APIError, and fails the session, if there are ``max_connections`` requests: an agent may take any
        error for a wrong answer of its own.
        """
        if self._num_requests >= self.max_connections:
            error = EndpointFullError(
                f"The endpoint has environment.endpoint.max_connections={self.max_connections} requests under way. "
                "Raise it, or run fewer trajectories at once."
            )
            session.fail(error)
            raise APIError(str(error), 503)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def _count_refusal(self, session: Session, error: APIError) -> None:
        """Count a refused request. The first one is logged: agents may swallow the error."""
        session.num_refused += 1
        if not self._has_refused:
            self._has_refused = True
            log.warning(
                "A request of an agent was refused: %s Metric environment/refused_requests counts them; only the "
                "first one is logged.",
                cut_line(error.message),
            )

    async def _authenticate(self, headers: Mapping[str, str], *, is_reading: bool) -> Session:
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        parts = given.split("-", 2)
        shared = self._shared_keys.get(parts[1]) if len(parts) == 3 else None
        if shared is not None and shared.is_given(given):
            named = await shared.find(headers) if is_reading or HEADER in headers else None
            if named is None:
                raise APIError(f"The request's {HEADER} names no session that is open.", 404)
            return named
        session = self._sessions.get(parts[1]) if len(parts) == 3 else None
        # The identifier is not a secret; the key found by it is compared in constant time.
        if session is None or not hmac.compare_digest(session.key.encode(), given.encode()):
            raise APIError("The API key is of no session that is open.", 401, code="invalid_api_key")
        return session

    async def _run(self, route: Route, session: Session, body: JsonObject, request: Request, send: Send) -> None:
        """Run a route, and send its response or its stream."""
        if session.failure.done():
            raise APIError("The session has failed; its trajectory is over.", 500)
        if len(session.requests) >= self.max_requests:
            raise APIError(f"{self.max_requests} requests of the session are under way.", 429)
        work = RouteWork(route, session, body, request)
        try:
            event = await work.next_event()
            if event is not None:
                await send_events(send, work, event, request.path)
                return
            reply = work.result()
        finally:
            work.end()
        await send_json(send, reply)


class RouteWork:
    """The task that answers one request, until the client disconnects."""

    def __init__(self, route: Route, session: Session, body: JsonObject, request: Request) -> None:
        self._session = session
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._work = asyncio.ensure_future(_call(route, session, body, self._events.put_nowait))
        self._gone = asyncio.ensure_future(request.wait_until_gone())
        session.requests.add(self._work)
        self._work.add_done_callback(session.requests.discard)
        for one in (self._work, self._gone):
            one.add_done_callback(lambda _: self._events.put_nowait(None))

    async def next_event(self) -> Event | None:
        """Wait for the next event of the response's stream, and return it; None after the last one.

        Raises:
            ClientGoneError: the client has disconnected.
        """
        event = await self._events.get()
        if self._gone.done() and not self._work.done():
            self._session.num_abandoned += 1
            raise ClientGoneError
        return event

    def result(self) -> Reply:
        """Return the response's body; None if it was streamed. Call it after the last event.

        Raises:
            APIError: the route failed.
        """
        if self._work.cancelled():
            raise APIError("The session was closed.", 503)
        return self._work.result()

    def end(self) -> None:
        """Cancel the request's task, and stop waiting for the client to disconnect."""
        self._gone.cancel()
        self._work.cancel()


async def send_events(send: Send, work: RouteWork, first: Event, path: str) -> None:
    """Send the events of a stream as they are emitted, until the last one.

    Raises:
        ClientGoneError: the client has disconnected.
    """
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    event: Event | None = first
    try:
        while event is not None:
            await send({"type": "http.response.body", "body": _write_event(event), "more_body": True})
            event = await work.next_event()
        work.result()
    except APIError as error:
        last = _write_event(_error_event(error, path))
        await send({"type": "http.response.body", "body": last, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _error_event(error: APIError, path: str) -> Event:
    return ("error", error.to_anthropic()) if path.startswith(ANTHROPIC) else (None, error.to_openai())


async def _call(route: Route, session: Session, body: JsonObject, emit: Emit) -> Reply:
    """Call a route; an error that the request did not cause makes the session fail."""
    try:
        return await route(session, body, emit)
    except LimitReachedError as error:
        limit = session.policy.max_length
        raise APIError(
            f"{LIMIT_TEXT} {limit} tokens. {error} Shorten the messages.",
            param="messages",
            code="context_length_exceeded",
        ) from error
    except APIError:
        raise
    except Exception as error:
        session.fail(error)
        raise APIError(f"The policy cannot be sampled from: {describe_error(error)}", 500) from error


def _write_event(event: Event) -> bytes:
    name, data = event
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def _import_server() -> ModuleType:
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"The endpoint for agents needs an HTTP server, and {error.name} is not installed: pip install "
            "'rlightning[agents]'."
        ) from error
    return uvicorn
