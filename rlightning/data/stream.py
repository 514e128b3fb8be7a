"""The endless, resumable order in which a run sees its prompts."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlightning.errors import ConfigError
from rlightning.types import Prompt


class PromptStream:
    """A prompt set, over and over, each time in another order.

    The whole state is one number, ``position``: how many prompts all ranks together have taken since the start. The
    order of an epoch follows from (seed, epoch) alone: a resumed run goes on where it stopped, on any number of ranks.

    Every rank must call :meth:`take` equally often with equal numbers: each gets its own share of what is taken.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, shuffle: bool = True, seed: int = 0, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self.prompts = prompts
        self.shuffle = shuffle
        self.seed = seed
        self.rank = rank
        self.num_ranks = num_ranks
        self.position = 0
        self.step_start = 0
        self.fingerprint: str = getattr(prompts, "fingerprint", None) or digest_texts(prompt.text for prompt in prompts)
        self._order_epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def begin_step(self) -> None:
        """Remember the position: an unfinished step is repeated from here."""
        self.step_start = self.position

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next ``num_prompts`` for this rank; the other ranks get as many others."""
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

    def state_dict(self, *, at_step_start: bool = False) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on from here, or from the start of the present step."""
        return {
            "position": self.step_start if at_step_start else self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where ``state`` was saved; other prompts or another order than there are a ConfigError."""
        mine = self.state_dict()
        way_out = "Resume with the data and settings of the checkpoint, or start a new run from its weights."
        for name, noun in (("num_prompts", "prompts"), ("seed", "as seed"), ("shuffle", "as shuffle")):
            if state[name] != mine[name]:
                raise ConfigError(
                    f"The checkpoint was written with {state[name]} {noun}, this run has {mine[name]}: "
                    f"its position means nothing here. {way_out}"
                )
        if state["fingerprint"] != self.fingerprint:
            raise ConfigError(
                f"The {len(self.prompts)} training prompts are not those that the checkpoint was written with "
                f"(fingerprint {self.fingerprint}, there {state['fingerprint']}). {way_out}"
            )
        self.position = self.step_start = int(state["position"])


def digest_texts(texts: Iterable[str]) -> str:
    """Return a digest of the texts of a prompt set, in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()
