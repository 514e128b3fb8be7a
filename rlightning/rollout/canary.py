"""The canary: tokens that actor and engine score, to tell an engine that rounds otherwise from one with other weights.

The actor scores the canary several times, each time with other rounding errors. An engine that holds the actor's
weights is as far from each of these evaluations as they are from each other; other weights lead further away. Former
weights, be they as near as rounding errors, lead in a direction that is known: towards what the actor gave before the
update.

Letters: ``K`` evaluations, ``N`` sequences, ``L`` tokens of each, ``S`` scored tokens: all but each sequence's first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from rlightning.errors import ConfigError, EngineError
from rlightning.models.architecture import describe_traits
from rlightning.parallel.collectives import any_rank
from rlightning.parallel.sharding import local_tensor
from rlightning.protocols import HasAdapter, HasConfig, SampledPolicy, adapter_of, has
from rlightning.rollout.comparison import Findings, Floats, compare, find_way_back
from rlightning.types import RolloutBatch

Score = Callable[[RolloutBatch, torch.dtype], Tensor]
"""[T] log-probabilities of a batch under the actor at temperature 1, computed in the engine's dtype."""

MAX_DISTANCE = 1.2
"""Maximum distance of an engine from the actor's evaluations, as a multiple of their distance from each other."""
MAX_SHARE = 0.1
"""Maximum share of an update that an engine may seem to lack: errors of a size unlike the actor's may look like 3%."""
BEYOND = 1.5
"""Ways by which an engine is off that is not on the way back: of tokens that lead anywhere half seem to lead back."""
MAX_ERRORS = 6.0
"""Maximum standard errors of the lacking share: chance leads as far in less than one of 10^7 syncs."""

NUM_FORWARDS = 2
NUM_COPIES = 2
"""Copies of the canary in a forward pass. Times ``NUM_FORWARDS`` it is ``K``: one pass would take more memory."""
CANARY_TOKENS = 1024
CANARY_LENGTH = 128
LEAST_CANARY_LENGTH = 32
SEEN = 5.0
"""Least change of the actor's log-probabilities with other values in its adapter, as a multiple of their noise."""
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-12}
"""The relative error that the embeddings get. In half precision it is one of rounding, and has all later layers round
otherwise. In float32 they would not: it stands for all that they lose, with room for wide and deep models."""
TF32_ROUNDING = 2.0**-6
"""The relative error of TF32 products, by which vLLM multiplies float32 matrices on a GPU."""


class Evaluation(NamedTuple):
    """The actor's log-probabilities [K, S] of the canary under the weights of a version."""

    version: int
    logprobs: Floats


class Canary:
    """Token sequences that actors and engines score after a sync.

    An engine that holds former weights has those of the sync before, or those that were verified last: what was sent
    since then may be lost.

    Args:
        tokenizer: the policy's.
        max_length: tokens of the longest sequence that the engine takes.
        dtype: the engine's.
        device: the engine's.
        tolerance: the largest distance of an engine from the actor, as a multiple of the actor's noise.

    Attributes:
        token_ids: [N, L].
        findings: of the last check.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        tolerance: float = MAX_DISTANCE,
    ) -> None:
        # An engine samples a token for a sequence that it scores.
        self.token_ids = canary_tokens(tokenizer, max_length - 1)
        self.tolerance, self._dtype = tolerance, dtype
        is_tf32 = dtype == torch.float32 and device.type == "cuda"
        self._rounding = TF32_ROUNDING if is_tf32 else ROUNDING[dtype]
        self._batch = RolloutBatch.of_sequences(self.token_ids.tolist() * NUM_COPIES)
        self._latest: Evaluation | None = None
        self._former: Evaluation | None = None  # of the sync before
        self._verified: Evaluation | None = None  # before the latest
        self._has_passed = False
        self.findings: Findings | None = None
        self._base: Floats | None = None  # without its adapter

    def evaluate(
        self, score: Score, weight_version: int, adapter_off: Callable[[], AbstractContextManager[None]] | None = None
    ) -> None:
        """Have the actor score it; what it gave for another version is that of former weights from now on.

        Args:
            score: the actor's.
            weight_version: of it.
            adapter_off: within, it scores without its adapter; None if it has none.
        """
        if adapter_off is not None:
            with adapter_off():
                self._base = evaluate(score, self._batch, self._dtype, self._rounding)
        if self._latest is not None and self._latest.version != weight_version:
            self._former = self._latest
            self._verified = self._latest if self._has_passed else self._verified
            self._has_passed = False
        self._latest = Evaluation(weight_version, evaluate(score, self._batch, self._dtype, self._rounding))

    def check(self, answers: NDArray[np.float32], model_config: PreTrainedConfig | None = None) -> None:
        """Raise EngineError if an engine has other weights than the actor had when it was evaluated.

        Args:
            answers: [N, L], the engine's log-probabilities; the first of each sequence is not looked at.
            model_config: the actor's, for what the error says of its architecture; None where it is not known.
        """
        assert self._latest is not None, "evaluate comes first"
        version, actor = self._latest
        engine = answers[:, 1:].flatten().astype(np.float64)
        reason = self._find_fault(actor, engine)
        if reason is None:
            self._has_passed = True
            return
        traits = [] if model_config is None else describe_traits(model_config)
        number, length = self.token_ids.shape
        raise EngineError(
            f"Actor and engine disagree after weights of version {version} were sent: the canary's mean "
            f"log-probability is {actor.mean():.4f} under the actor and {engine.mean():.4f} under the engine, "
            f"and {reason}. Checked: every parameter of the engine's model was loaded, and {number} sequences of "
            f"{length} tokens were compared. The architecture: {'; '.join(traits) or 'unknown'}."
        )

    def check_is_seen(self) -> None:
        """Raise EngineError if the actor gives the same without its adapter: an engine could not be told from one."""
        assert self._latest is not None and self._base is not None, "evaluate comes first, of an adapter"
        found = compare(self._latest.logprobs, self._base.mean(0))
        if not found.distance > SEEN * found.noise:
            raise EngineError(
                f"Whether the engine uses the adapter cannot be told: with other values in it the actor's canary moves "
                f"by {found.distance:.3g} nats, where rounding makes {found.noise:.3g}. rollout.verify_every: 0 goes "
                "on without."
            )

    def _find_adapter_fault(self, actor: Floats, engine: Floats, *, is_far: bool) -> str | None:
        """Say whether the engine adds another adapter to the base, less of it or more."""
        if self._base is None:
            return None
        way, alone = find_way_back(actor, self._base, engine), compare(self._base, engine)
        if is_far and alone.distance <= self.tolerance * alone.noise:
            return "the engine is where the actor is without its adapter: it does not apply the adapter"
        if abs(way.errors) <= MAX_ERRORS or abs(way.share) <= MAX_SHARE:
            return None
        direction = "back to" if way.share > 0 else "further away from"
        return (
            f"the engine is {abs(way.share):.0%} of the way {direction} the model without its adapter, by "
            f"{abs(way.errors):.1f} standard errors, where {MAX_ERRORS:g} may be chance: it applies the adapter with "
            "another scale, in part, or more than once"
        )

    def _find_fault(self, actor: Floats, engine: Floats) -> str | None:
        """Say what is wrong, if anything is."""
        found = compare(actor, engine)
        is_far = not found.distance <= self.tolerance * found.noise  # nor is it near if one of them is not a number
        formers = {former.version: former.logprobs for former in (self._former, self._verified) if former is not None}
        ways = {version: find_way_back(actor, logprobs, engine) for version, logprobs in formers.items()}
        self.findings = Findings(found, ways)
        near = [pair for pair in ways.items() if not (is_far and found.distance > BEYOND * pair[1].length)]
        version, way = max(near, key=lambda pair: pair[1].errors, default=(0, None))
        if way is not None and way.share > MAX_SHARE and way.errors > MAX_ERRORS:
            return (
                f"the engine is {way.share:.0%} of the way back to the weights of version {version}, by "
                f"{way.errors:.1f} standard errors, where {MAX_ERRORS:g} may be chance: it holds former weights, "
                "all or some of them"
            )
        if fault := self._find_adapter_fault(actor, engine, is_far=is_far):
            return fault
        if not is_far:
            return None
        return (
            f"they differ by {found.distance:.3g} nats, {found.distance / found.noise:.3g} times the "
            f"{found.noise:.3g} that rounding makes of the actor's, where rollout.verify_tolerance allows "
            f"{self.tolerance:g} times: the engine holds other weights, or computes otherwise than the actor"
        )


class VerifiedSampler(Protocol):
    """What is verified of a sampler.

    Attributes:
        weight_version: of the weights that it holds; None where it has none.
        is_verified: whether it has been found to hold the actor's weights, since its start.
        is_proven: whether it has been found to use an adapter, since its start.
    """

    weight_version: int | None
    is_verified: bool
    is_proven: bool

    @property
    def is_alive(self) -> bool:
        """Whether it can score, as far as is known."""

    def score_all(self, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the log-probabilities at temperature 1 of some sequences [N, L]: [N, L], 0 for their first tokens."""


class Verification:
    """Verifies each engine's first weights, and all engines at every so many syncs.

    Args:
        every: syncs between two verifications; 0 verifies nothing.
        tolerance: see :class:`Canary`.

    Attributes:
        canary: of the run; None where nothing is verified.
    """

    def __init__(self, every: int, tolerance: float) -> None:
        if every < 0:
            raise ConfigError(f"rollout.verify_every={every} must be at least 0, where 0 verifies nothing.")
        if not tolerance > 1:
            raise ConfigError(
                f"rollout.verify_tolerance={tolerance} must be above 1: it is a multiple of the actor's own rounding "
                f"errors. Leave it out for {MAX_DISTANCE}."
            )
        self.every, self.tolerance = every, tolerance
        self.num_syncs = 0
        self.canary: Canary | None = None

    def begin_run(self, module: SampledPolicy, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Count syncs anew."""
        self.num_syncs = 0
        self.canary = Canary(module.tokenizer, max_length, dtype, device, self.tolerance) if self.every else None

    def needs_proof(self, module: SampledPolicy, engines: Sequence[VerifiedSampler]) -> bool:
        """Whether an engine of any rank has not shown yet that it uses an adapter; all ranks call it."""
        if self.canary is None or adapter_of(module) is None:
            return False
        return any_rank(any(one.is_alive and not one.is_proven for one in engines), name="adapter is proven")

    def evaluate(self, module: SampledPolicy, engines: Sequence[VerifiedSampler], *, is_proof: bool = False) -> bool:
        """Have the actor score the canary, if this sync or the next is verified on any rank; all ranks call it.

        Args:
            module: as of :meth:`begin_run`, with the weights that are about to be sent.
            engines: of this rank.
            is_proof: whether these are no weights to sample from, but an adapter whose effect cannot be overlooked.

        Returns:
            Whether this rank's engines are to be verified once they have the weights.
        """
        if self.canary is None:
            return False
        adapter_off = module.adapter_off if has(module, HasAdapter) and module.adapter is not None else None
        if is_proof:
            self.canary.evaluate(module.score, module.weight_version, adapter_off)
            self.canary.check_is_seen()
            return True
        is_new = any(engine.is_alive and not engine.is_verified for engine in engines)
        is_due = is_new or self.num_syncs % self.every == 0
        self.num_syncs += 1  # here, where all ranks are: an engine that dies in the sync is one rank's
        if any_rank(is_due or self.num_syncs % self.every == 0, name="canary"):
            self.canary.evaluate(module.score, module.weight_version, adapter_off)
        return is_due

    def verify(self, module: SampledPolicy, engine: VerifiedSampler) -> None:
        """Refuse to sample from an engine that has other weights than the actor had at :meth:`evaluate`.

        Raises:
            EngineError: if it has.
        """
        assert self.canary is not None, "begin_run and evaluate come first"
        try:
            config = module.model_config if has(module, HasConfig) else None
            self.canary.check(engine.score_all(self.canary.token_ids), config)
        except EngineError:
            engine.weight_version = None  # its weights are taken for none
            raise
        engine.is_verified = True


def canary_tokens(tokenizer: PreTrainedTokenizerBase, max_length: int) -> NDArray[np.int64]:
    """Return the canary [N, L]: sums in every other sequence, tokens drawn at random in the others.

    Args:
        tokenizer: the policy's. Special and added tokens are left out: some of them stand for what is no text.
        max_length: the most tokens of a sequence, at least 2.
    """
    rng = np.random.default_rng(0)
    length = min(CANARY_LENGTH, max_length)
    excluded = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    token_ids = rng.choice(
        [token for token in range(len(tokenizer)) if token not in excluded], (CANARY_TOKENS // length, length)
    )
    for row in token_ids[::2]:
        terms = rng.integers(1000, size=(length, 2)).tolist()
        text = "".join(f"What is {a} + {b}? {a} + {b} = {a + b}. " for a, b in terms)
        sums = tokenizer(text, add_special_tokens=False).input_ids[:length]
        row[: len(sums)] = sums
    return token_ids


@contextmanager
def perturbed_embeddings(rounding: float, seed: int) -> Iterator[None]:
    """Within, each number that an ``nn.Embedding`` gives has a relative error, drawn anew.

    Args:
        rounding: the largest error, unless the embedding's dtype, or autocast's, is coarser.
        seed: of the errors.

    Raises:
        EngineError: if no embedding was called.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(module: nn.Module, inputs: object, output: Tensor) -> None:
        if not isinstance(module, nn.Embedding):
            return
        values = local_tensor(output)
        device = values.device
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else values.dtype
        size = max(rounding, ROUNDING.get(dtype, 0.0))
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)  # the run's own numbers are left alone
        errors = torch.empty(values.shape, device=device).uniform_(-size, size, generator=generators[device])
        values.copy_(values * (1 + errors))

    handle = register_module_forward_hook(perturb)  # whatever the model is, sharded or compiled
    try:
        yield
    finally:
        handle.remove()
    if not generators:
        raise EngineError("The actor cannot be verified: its score() calls no torch.nn.Embedding.")


@torch.no_grad()
def evaluate(score: Score, batch: RolloutBatch, dtype: torch.dtype, rounding: float) -> Floats:
    """Return the actor's log-probabilities [K, S], each time with other rounding errors.

    Args:
        score: the actor's.
        batch: of ``NUM_COPIES`` times ``N`` sequences, on the CPU.
        dtype: the engine's.
        rounding: see :func:`perturbed_embeddings`.
    """
    evaluations = []
    for seed in range(NUM_FORWARDS):
        with perturbed_embeddings(rounding, seed):
            evaluations.append(score(batch, dtype))
    found = torch.stack(evaluations).double().cpu()[:, batch.is_sampled]
    return found.view(NUM_FORWARDS * NUM_COPIES, -1).numpy()
