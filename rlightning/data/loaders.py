"""What Lightning iterates over: sized, because it fetches one batch ahead from a loader without a length.

A batch fetched ahead would be counted as seen before it is, and with asynchronous rollouts generated from old weights.
"""

from collections.abc import Iterator, Sequence
from typing import Any, overload

from rlightning.data.stream import PromptStream
from rlightning.types import Prompt


class PromptLoader:
    """One epoch of steps from a stream that goes on from epoch to epoch.

    An epoch has as many steps as fit into the set once. What is left over opens the next epoch, and so do the prompts
    after those that a step took in addition: no prompt is skipped.

    Args:
        stream: the prompts.
        num_prompts: of a step, on this rank.
        num_steps: of an epoch, where the stream repeats fewer prompts (``trainer.overfit_batches``).
    """

    def __init__(self, stream: PromptStream, num_prompts: int, *, num_steps: int | None = None) -> None:
        self.stream = stream
        self.num_prompts = num_prompts
        self.num_steps = len(stream.prompts) // (num_prompts * stream.num_ranks) if num_steps is None else num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[Prompt]]:
        for _ in range(len(self)):
            self.stream.begin_step()
            yield self.stream.take(self.num_prompts)

    def state_dict(self) -> dict[str, Any]:
        """Nothing, the position is the data module's; without this method Lightning warns of an inexact resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class ChosenPrompts(Sequence[Prompt]):
    """Some of a prompt set, which may stay on disk.

    Args:
        prompts: the set.
        places: of those that are chosen.
    """

    def __init__(self, prompts: Sequence[Prompt], places: Sequence[int]) -> None:
        self._prompts = prompts
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self._prompts[place] for place in self._places[index]]
        return self._prompts[self._places[index]]


class PromptBatches:
    """A prompt set once, in its order, each batch split over the ranks.

    All ranks get equally many batches; in the last one a rank may get fewer prompts than others, or none.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> None:
        self.prompts = prompts
        self.batch_size = batch_size
        self.rank = rank
        self.num_ranks = num_ranks

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for start in range(0, len(self.prompts), self.batch_size):
            yield list(self.prompts[start + self.rank : start + self.batch_size : self.num_ranks])
