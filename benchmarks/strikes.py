"""Callbacks that send an engine wrong weights in many ways, and right ones far more often, and ask the canary."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from probes import CSVTrace
from torch import Tensor

from rlightning.errors import EngineError
from rlightning.hooks import RLCallback
from rlightning.parallel.device import synchronize

Sent = dict[str, Callable[[], Tensor]]
"""What is sent instead of some weights, by their names; made when its turn comes."""

SCALES = (1.0, 0.1, 0.01, 0.0)
"""Sizes of the updates before right weights are sent, in turn; by the learning rate."""
REPEATS = 5
"""Of what is timed by itself."""
GROWTH = 100.0
"""Learning rates by which each number of an adapter changes before its later strikes."""
DUMMY = 1e-3
"""The largest of the numbers that an engine begins with, in vLLM's format "dummy"."""


class Update(NamedTuple):
    """A step of the size of Adam's first: each weight goes up or down by the learning rate, in random directions."""

    seed: int
    lr: float

    def of(self, number: int, weight: Tensor) -> Tensor:
        """What the weight of that number gets; the same each time."""
        generator = torch.Generator(weight.device).manual_seed(1_000_003 * self.seed + number)
        return torch.empty_like(weight).bernoulli_(0.5, generator=generator).mul_(2 * self.lr).sub_(self.lr)


class Actor:
    """An actor's weights, and how they were before the last update.

    Args:
        weights: by name; they are changed in place.
    """

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights
        self.numbers = {name: number for number, name in enumerate(weights)}
        self.last = Update(0, 0.0)

    def spread(self) -> None:
        """Put them between bfloat16's numbers, where some updates would have them: the first is lost in rounding."""
        for name, weight in self.weights.items():
            weight.mul_(1 + 2**-8 * (self._noise(name).clamp_(-2, 2) / 4))

    def update(self, lr: float) -> None:
        """Go on by one update."""
        self.last = Update(self.last.seed + 1, lr)
        for name, weight in self.weights.items():
            weight.add_(self.last.of(self.numbers[name], weight))

    def former(self, name: str) -> Tensor:
        """A weight before the last update."""
        return self.weights[name] - self.last.of(self.numbers[name], self.weights[name])

    def other(self, name: str, share: float = 1.0) -> Tensor:
        """Random values of a weight's usual size, or the weight with so large a share of such values added."""
        weight = self.weights[name]
        size = torch.linalg.vector_norm(weight) / math.sqrt(weight.numel())
        noise = self._noise(name).mul_(size * share)
        return noise if share == 1 else noise.add_(weight)

    def left_out(self, name: str) -> Tensor:
        """What the engine began with."""
        return torch.empty_like(self.weights[name]).uniform_(-DUMMY, DUMMY)

    def transposed(self, name: str) -> Tensor:
        """The transpose's numbers, in the matrix's own shape where it is not square."""
        return self.weights[name].T.contiguous().view(self.weights[name].shape)

    def with_rows(self, name: str, one: int, of: int, make: Callable[[str], Tensor]) -> Tensor:
        """A weight of which one shard of several is not the one that it should be."""
        wrong, rows = make(name), len(self.weights[name]) // of
        weight = self.weights[name].clone()
        weight[one * rows : (one + 1) * rows] = wrong[one * rows : (one + 1) * rows]
        return weight

    def _noise(self, name: str) -> Tensor:
        weight = self.weights[name]
        return torch.randn(
            weight.shape,
            dtype=weight.dtype,
            device=weight.device,
            generator=torch.Generator(weight.device).manual_seed(self.numbers[name]),
        )


def exchanged(actor: Actor, one: int, other: int) -> Sent:
    """Two layers in each other's place."""
    first, second = f".layers.{one}.", f".layers.{other}."
    pairs = {name: name.replace(first, second) for name in actor.weights if first in name}
    pairs |= {theirs: mine for mine, theirs in pairs.items()}
    return {name: partial(actor.weights.__getitem__, theirs) for name, theirs in pairs.items()}


def list_strikes(actor: Actor, num_layers: int) -> dict[str, Sent]:
    """All ways in which weights are wrong, by what the table calls them; matrices are those of the middle layer."""
    middle = num_layers // 2
    everything = list(actor.weights)
    matrices = [name for name in everything if actor.weights[name].ndim == 2]
    vectors = [name for name in everything if actor.weights[name].ndim == 1]
    layer = {name.split(".")[-2]: name for name in everything if f".layers.{middle}." in name}

    def all_of(names: Sequence[str], make: Callable[..., Tensor], *values: Any) -> Sent:
        return {name: partial(make, name, *values) for name in names}

    strikes = {
        "all stale by one update": all_of(everything, actor.former),
        "one shard of two stale": all_of(matrices, actor.with_rows, 1, 2, actor.former),
        "one shard of eight stale": all_of(matrices, actor.with_rows, 3, 8, actor.former),
        "norms and biases stale": all_of(vectors, actor.former),
        "down_proj stale": all_of([layer["down_proj"]], actor.former),
        "neighbouring layers exchanged": exchanged(actor, middle - 1, middle),
        "first and last layer exchanged": exchanged(actor, 0, num_layers - 1),
        "one shard of eight of the embedding": all_of(matrices[:1], actor.with_rows, 3, 8, actor.other),
    }
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"):
        name = layer[kind]
        rows, columns = actor.weights[name].shape
        shape = "square" if rows == columns else f"{rows} x {columns}"
        strikes[f"{kind} of other values"] = all_of([name], actor.other)
        strikes[f"{kind} transposed ({shape})"] = all_of([name], actor.transposed)
        strikes[f"{kind} left out"] = all_of([name], actor.left_out)
    for kind in ("q_proj", "down_proj"):
        strikes[f"one shard of two of {kind}"] = all_of([layer[kind]], actor.with_rows, 1, 2, actor.other)
        strikes[f"one shard of eight of {kind}"] = all_of([layer[kind]], actor.with_rows, 3, 8, actor.other)
    strikes["a norm left out"] = all_of([layer["input_layernorm"]], actor.left_out)
    for share in (0.3, 0.1):
        strikes[f"a norm off by {share:.0%}"] = all_of([layer["input_layernorm"]], actor.other, share)
    for share in (0.03, 0.01, 0.003):
        strikes[f"norms and biases off by {share:.1%}"] = all_of(vectors, actor.other, share)
    for share in (0.01, 0.003, 0.001):
        strikes[f"all off by {share:.1%}"] = all_of(everything, actor.other, share)
    return strikes


def list_adapter_strikes(actor: Actor, num_layers: int) -> dict[str, Sent]:
    """All ways in which an adapter is wrong that an engine may have got, by what the table calls them. An adapter is
    left out, or has another scale, where its B has.
    """
    factors = [name for name in actor.weights if "lora_B" in name]
    middle = f".layers.{num_layers // 2}."
    rank = next(len(weight) for name, weight in actor.weights.items() if "lora_A" in name)

    def scaled(names: Sequence[str], factor: float) -> Sent:
        return {name: partial(torch.mul, actor.weights[name], factor) for name in names}

    def of_kind(kind: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if f".{kind}." in name]

    strikes = {
        "adapter left out": scaled(factors, 0.0),
        "applied twice": scaled(factors, 2.0),
        "scale for half of alpha": scaled(factors, 0.5),
        "rsLoRA's scale": scaled(factors, math.sqrt(rank)),
        "scale off by 10%": scaled(factors, 1.1),
        "neighbouring layers exchanged": exchanged(actor, num_layers // 2 - 1, num_layers // 2),
        "middle layer left out": scaled([name for name in factors if middle in name], 0.0),
    }
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        strikes[f"{kind} left out in all layers"] = scaled(of_kind(kind, factors), 0.0)
        strikes[f"{kind} left out in the middle layer"] = scaled(
            of_kind(kind, [name for name in factors if middle in name]), 0.0
        )
    return strikes


class StrikeWeights(RLCallback):
    """Before the first step: each strike, then right weights until there were so many syncs, all of them verified.

    Each sync follows an update. A strike is what the engine is sent instead of weights that the actor has just been
    evaluated with; after it the right ones are sent. Then the run stops, unless ``trainer.min_steps`` says otherwise.

    Args:
        syncs: of right weights, those after strikes among them.
        lr: of the updates.
        until: when to stop, in seconds since 1970.

    Attributes:
        source: the module's method that yields what is sent.
    """

    source = "named_weights"

    def __init__(self, syncs: int, lr: float, until: float) -> None:
        super().__init__()
        self.num_syncs, self.lr, self.until = syncs, lr, until
        found = ("alarm", "distance", "noise", "share", "errors", "seconds")
        self.syncs = CSVTrace("syncs", ["scale", *found])
        self.strikes = CSVTrace("strikes", ["strike", "parameters", "change", *found])
        self.parts = CSVTrace("parts", ["part", "seconds"])
        self._squares = torch.zeros(2, dtype=torch.float64)

    @torch.no_grad()
    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Do all of it."""
        actor = Actor({name: weight.detach() for name, weight in getattr(module, self.source)()})
        actor.spread()
        self._send_right(trainer, module, 1.0)
        self._strike_all(trainer, module, actor, module.model_config.get_text_config().num_hidden_layers)
        self._measure(trainer, module)
        while self.syncs.step < self.num_syncs and time.time() < self.until:
            scale = SCALES[self.syncs.step % len(SCALES)]
            self._update(module, actor, scale * self.lr)
            self._send_right(trainer, module, scale)
        trainer.should_stop = True

    def _strike_all(self, trainer: Any, module: Any, actor: Actor, num_layers: int) -> None:
        for strike, sent in list_strikes(actor, num_layers).items():
            self._strike_once(trainer, module, actor, strike, sent)

    def _strike_once(self, trainer: Any, module: Any, actor: Actor, strike: str, sent: Sent) -> None:
        if time.time() > self.until:
            return
        self._update(module, actor, self.lr)
        self._strike(trainer, module, actor, strike, sent)
        self._send_right(trainer, module, 1.0)

    def _update(self, module: Any, actor: Actor, lr: float) -> None:
        actor.update(lr)
        module.weight_version += 1

    def _send_right(self, trainer: Any, module: Any, scale: float) -> None:
        self.syncs.step += 1
        self.syncs.write(trainer, scale, *self._sync(module))

    def _strike(self, trainer: Any, module: Any, actor: Actor, strike: str, sent: Sent) -> None:
        """Send wrong weights; the actor is evaluated with the right ones, which the engine is sent by name."""
        right = getattr(module, self.source)
        self._squares.zero_()
        setattr(module, self.source, lambda: self._replace(right(), sent))
        try:
            findings = self._sync(module)
        finally:
            delattr(module, self.source)  # the instance's, before the class's own
        number = sum(actor.weights[name].numel() for name in sent)
        share = number / sum(weight.numel() for weight in actor.weights.values())
        wrong, whole = self._squares.tolist()
        self.strikes.step += 1
        self.strikes.write(trainer, strike, share, (wrong / whole) ** 0.5, *findings)
        module.sampler.engine.weight_version = None  # or what passed would not be sent again

    def _replace(self, weights: Iterator[tuple[str, Tensor]], sent: Sent) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if name in sent:
                wrong = sent[name]()
                norms = torch.stack([torch.linalg.vector_norm(wrong - weight), torch.linalg.vector_norm(weight)])
                self._squares += norms.double().cpu() ** 2
                weight = wrong
            yield name, weight

    def _sync(self, module: Any) -> list[Any]:
        """Whether it raised, and what; what the canary found; seconds."""
        rollout, alarm = module.sampler, ""
        synchronize(module.device)
        begun = time.perf_counter()
        try:
            rollout.collector.weights.sync_weights()
        except EngineError as error:
            if "Actor and engine disagree" not in str(error):
                raise
            alarm = classify(str(error))
        seconds = time.perf_counter() - begun
        found = rollout.verification.canary.findings
        missing = max(found.missing_updates.values(), key=lambda one: one.errors, default=None)
        share, errors = ("", "") if missing is None else (missing.share, missing.errors)
        return [alarm, *found.comparison, share, errors, seconds]

    def _measure(self, trainer: Any, module: Any) -> None:
        """Time the actor's evaluation and the engine's score by themselves."""
        canary = module.sampler.verification.canary
        parts = {
            "evaluate": lambda: canary.evaluate(module.score, module.weight_version),
            "score": lambda: module.sampler.engine.score_all(canary.token_ids),
        }
        for part, call in parts.items():
            for _ in range(REPEATS):
                begun = time.perf_counter()
                call()
                self.parts.write(trainer, part, time.perf_counter() - begun)


class StrikeAdapter(StrikeWeights):
    """The same with an adapter: each strike at the proof, of an engine that has not been shown to apply an adapter, and
    at later syncs.

    Before the later ones the adapter grows by :data:`GROWTH` updates in one, as by so many steps in one direction.
    """

    source = "adapter_weights"

    def _strike_all(self, trainer: Any, module: Any, actor: Actor, num_layers: int) -> None:
        strikes = list_adapter_strikes(actor, num_layers)
        for strike, sent in strikes.items():
            module.sampler.engine.is_proven = False
            self._strike_once(trainer, module, actor, f"proof: {strike}", sent)
        self._update(module, actor, GROWTH * self.lr)
        self._send_right(trainer, module, 1.0)
        strikes = {"stale by one update": {name: partial(actor.former, name) for name in actor.weights}} | strikes
        for strike, sent in strikes.items():
            self._strike_once(trainer, module, actor, strike, sent)


def classify(error: str) -> str:
    """What the canary took wrong weights for, by its message."""
    if "without its adapter" in error:
        return "adapter"
    return "former weights" if "of the way back" in error else "other weights"
