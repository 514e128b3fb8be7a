"""A prompt and what was sampled after it.

Letters in shapes: ``P`` tokens of a prompt, ``C`` of a completion.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

TEMPERATURES = (0.01, 2.0)
"""The lowest above 0 and the highest that vLLM samples with as they are."""


class Prompt(NamedTuple):
    """One row of a prompt set, ready for the engine.

    A tuple like :class:`Completion`: Lightning walks through batches and predictions, and fails at frozen dataclasses.

    Attributes:
        index: the row's place in its set; stable over epochs and resumes.
        text: what the model reads, after the chat template.
        token_ids: [P], the tokens of ``text``; nothing is tokenised again later.
        columns: the row as it was read; reward functions get these by name.
        completion_ids: [C], the tokens of the row's own completion, to learn from; None where it has none.
        temperature: that its completions are sampled with, in place of the run's; None: the run's.
        max_new_tokens: that its completions are cut at, below the run's limit; None: the run's.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index()
    text: str
    token_ids: list[int]
    columns: dict[str, Any]
    completion_ids: list[int] | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None


class Completion(NamedTuple):
    """What the policy wrote after a prompt.

    Attributes:
        text: the tokens decoded, without special tokens and the end of sequence; a stop string or stop token that the
            run has named is part of it.
        token_ids: [C] int64, as sampled (a final end-of-sequence token included).
        logprobs: [C] float32, of each token under the distribution that it was sampled from.
        weight_versions: [C] int32, the version of the weights that sampled each token.
        finish_reason: "stop" (end of sequence or a stop string) or "length" (cut at the token limit).
        extras: numbers of a generator's own by name, which :meth:`RolloutBatch.pack` lays beside the sequences.
    """

    text: str
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    weight_versions: NDArray[np.int32]
    finish_reason: Literal["stop", "length"]
    extras: dict[str, float] | None = None

    @property
    def is_truncated(self) -> bool:
        """Whether the token limit cut it."""
        return self.finish_reason == "length"
