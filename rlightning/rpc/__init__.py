"""Remote procedure calls in both directions over a socket pair or TCP."""

from rlightning.rpc.authentication import AuthenticationError, BusyError, make_url, new_key
from rlightning.rpc.client import LoopThread, ProcessStartError, background_loop, connect, connect_process, end_process
from rlightning.rpc.connection import Buffer, ConnectionLostError, RPCError
from rlightning.rpc.peer import DeadlineExceededError, Peer, RemoteError
from rlightning.rpc.server import Server, listen, serve_parent

__all__ = [
    "AuthenticationError",
    "Buffer",
    "BusyError",
    "ConnectionLostError",
    "DeadlineExceededError",
    "LoopThread",
    "Peer",
    "ProcessStartError",
    "RPCError",
    "RemoteError",
    "Server",
    "background_loop",
    "connect",
    "connect_process",
    "end_process",
    "listen",
    "make_url",
    "new_key",
    "serve_parent",
]
