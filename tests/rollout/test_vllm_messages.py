"""Messages of vLLM's core arrive as they were sent, also from versions that reuse a buffer too early."""

from pathlib import Path

import pytest
import zmq
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from rlightning.rollout.vllm.scheduler import TOKENS_AT_ONCE, Tokens
from rlightning.rollout.vllm.server import set_variables

NUM_SEQUENCES = 300
VARIABLES = "VLLM_MSGPACK_ZERO_COPY_THRESHOLD", "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"


def outputs_of(step: int) -> EngineCoreOutputs:
    """What a step sends of sequences that have each sampled the step's number only."""
    tokens = Tokens([step] * TOKENS_AT_ONCE, [-1.0] * TOKENS_AT_ONCE, [0] * TOKENS_AT_ONCE)
    names = (f"{step}-{n}-abcdefabcdefabcdefabcdef" for n in range(NUM_SEQUENCES))
    return EngineCoreOutputs(outputs=[EngineCoreOutput(name, tokens.ids, tokens.as_lists()) for name in names])


def send_all(socket: "zmq.Socket[bytes]", num_steps: int) -> None:
    """Send as vLLM 0.24's core does: a buffer is used again as soon as the last frame's tracker allows it."""
    encoder, free, pending = MsgpackEncoder(), list[bytearray](), list[bytearray]()
    for step in range(num_steps):
        buffer = free.pop() if free else bytearray()
        tracker = socket.send_multipart(encoder.encode_into(outputs_of(step), buffer), copy=False, track=True)
        assert tracker is not None
        (free if tracker.done else pending).append(buffer)


@pytest.mark.parametrize("is_one_frame", [True, False])
def test_no_message_is_overwritten(is_one_frame: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "256")  # vLLM's default, and restored afterwards
    if is_one_frame:
        set_variables()
    decoder = MsgpackDecoder(EngineCoreOutputs)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender, context.socket(zmq.PULL) as receiver:
        sender.connect(f"ipc://{tmp_path}/socket")
        send_all(sender, 3)  # nobody reads yet, so that nothing has left
        receiver.bind(f"ipc://{tmp_path}/socket")
        received = [decoder.decode(receiver.recv_multipart(copy=False)) for _ in range(3)]
    sampled = [{token for output in message.outputs for token in output.new_token_ids} for message in received]
    assert (sampled == [{0}, {1}, {2}]) is is_one_frame
