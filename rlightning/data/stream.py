"""The endless, resumable order in which a run takes its prompts."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from rlightning.data.digests import digest_columns, digest_texts
from rlightning.data.mapped import MappedPrompts
from rlightning.data.rows import LazySequence
from rlightning.errors import ConfigError
from rlightning.protocols import StateDict
from rlightning.types import Prompt


class PromptStream:
    """Repeats a prompt set endlessly, each time in another order.

    The whole state is one number, ``position``: the number of prompts that all ranks have taken since the start. The
    order of an epoch depends only on (seed, epoch), so that a run can be resumed on any number of ranks.

    Every rank must call :meth:`take` equally often with the same numbers, and gets its own share of the prompts.

    Args:
        prompts: the set.
        shuffle: whether each epoch has its own order.
        seed: determines these orders.
        rank: this process's.
        num_ranks: number of ranks.
        columns: names of the columns that rewards read, which must be unchanged in a resumed run.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        columns: Collection[str] = (),
    ) -> None:
        self.prompts, self.shuffle, self.seed = prompts, shuffle, seed
        self.rank, self.num_ranks = rank, num_ranks
        self.position = self.step_start = 0
        self.fingerprint: str
        self.column_digests: dict[str, str]
        if isinstance(prompts, MappedPrompts):
            self.fingerprint, self.column_digests = prompts.fingerprint, prompts.digest_columns(columns)
        else:
            self.fingerprint = digest_texts(prompt.text for prompt in prompts)
            self.column_digests = digest_columns((prompt.columns for prompt in prompts), columns)
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def begin_step(self) -> None:
        """Store the current position as the start of a step, from which a run resumed during the step continues."""
        self.step_start = self.position

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return this rank's next ``num_prompts`` prompts; every rank must call it, with the same number."""
        start = self.position + self.rank * num_prompts
        self.position += num_prompts * self.num_ranks
        return [self._at(place) for place in range(start, start + num_prompts)]

    def _at(self, place: int) -> Prompt:
        epoch, offset = divmod(place, len(self.prompts))
        if epoch != self._order_epoch:
            self._order_epoch = epoch
            self._order = np.arange(len(self.prompts))
            if self.shuffle:
                np.random.default_rng([self.seed, epoch]).shuffle(self._order)
        return self.prompts[int(self._order[offset])]

    def state_dict(self, *, at_step_start: bool = False) -> StateDict:
        """Return the position now, or at the start of an unfinished step."""
        return {
            "position": self.step_start if at_step_start else self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
            "columns": self.column_digests,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a position; raises a ConfigError if the prompts or their order have changed."""
        mine = self.state_dict()
        way_out = "Resume with the data and settings of the checkpoint, or start a new run from its weights."
        for name, noun in (("num_prompts", "prompts"), ("seed", "as seed"), ("shuffle", "as shuffle")):
            if state[name] != mine[name]:
                raise ConfigError(
                    f"The checkpoint was written with {state[name]} {noun}, this run has {mine[name]}: "
                    f"its position does not apply here. {way_out}"
                )
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"The {len(self.prompts)} training prompts are not those that the checkpoint was written with, or in "
                f"another order. {way_out}"
            )
        for column, digest in state.get("columns", {}).items():
            if self.column_digests.get(column, digest) != digest:
                raise ConfigError(
                    f"The column '{column}' of the training prompts, which the rewards read, is not what it was when "
                    f"the checkpoint was written. {way_out}"
                )
        self.position = self.step_start = int(state["position"])


class PromptLoader:
    """Data loader for one epoch: yields this rank's ``num_prompts`` for each of ``num_steps`` steps.

    The next epoch continues the stream with the remaining prompts, also after refills: no prompt is skipped.
    """

    def __init__(self, stream: PromptStream, num_prompts: int, *, num_steps: int) -> None:
        self.stream, self.num_prompts, self.num_steps = stream, num_prompts, num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[Prompt]]:
        for _ in range(self.num_steps):
            self.stream.begin_step()
            yield self.stream.take(self.num_prompts)

    def state_dict(self) -> StateDict:
        """Return an empty state, since the data module saves the position; without this method Lightning warns."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Do nothing."""


class ChosenPrompts(LazySequence[Prompt]):
    """The prompts at selected indices of a set, which may be on disk."""

    def __init__(self, prompts: Sequence[Prompt], places: Sequence[int]) -> None:
        self._prompts, self._places = prompts, places

    def __len__(self) -> int:
        return len(self._places)

    def read(self, start: int, stop: int) -> list[Prompt]:
        """Return the prompts from ``start`` to ``stop``."""
        return [self._prompts[place] for place in self._places[start:stop]]


class PromptBatches:
    """Data loader for one pass over a prompt set in its order: yields this rank's share of each batch.

    All ranks get the same number of batches; in the last one a rank may get fewer prompts than others, or none.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> None:
        self.prompts, self.batch_size, self.rank, self.num_ranks = prompts, batch_size, rank, num_ranks

    def __len__(self) -> int:
        return -(-len(self.prompts) // self.batch_size)

    def __iter__(self) -> Iterator[list[Prompt]]:
        for start in range(0, len(self.prompts), self.batch_size):
            yield list(self.prompts[start + self.rank : start + self.batch_size : self.num_ranks])
