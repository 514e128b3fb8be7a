"""A model small enough to train in a test, a Trainer for it, and an engine that needs no process."""

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlightning.algorithms import GRPO
from rlightning.data import PromptDataModule
from rlightning.errors import ConfigError
from rlightning.models.attention import packed_inputs
from rlightning.module import RLModule
from rlightning.rewards import RewardFunction
from rlightning.rollout import OnCompleted, Sampling, TrajectorySampler
from rlightning.types import Prompt, RolloutBatch, Sample, Trajectory, single_turns

VOCABULARY = {"<eos>": 0, **{character: i + 1 for i, character in enumerate("0123456789+= ")}}
MAX_NEW_TOKENS = 6
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}{% endif %}{% endif %}"
)
"""It takes the argument that the configurations for Qwen3 give, to no effect."""


@contextmanager
def refused(message: str) -> Iterator[None]:
    """Within, a ConfigError of one line is raised, in which a regular expression is found."""
    import pytest  # which processes that tests start do without

    with pytest.raises(ConfigError, match=message) as error:
        yield
    assert "\n" not in str(error.value)


def change_config(folder: str | Path, **changes: Any) -> None:
    """Write other values into a model's config.json."""
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def heed_ctrl_c() -> None:
    """Let Ctrl-C end the processes that tests start: a run begun in the background ignores it, and so would they."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def save_model(folder: Path, seed: int = 0, **config: Any) -> str:
    """Write a two-layer Qwen3 of some thousand parameters that reads characters; token 0 ends a sequence.

    Args:
        folder: gets the model and its tokenizer.
        seed: of the weights.
        config: of Qwen3Config, in place of the sizes here.
    """
    tokenizer = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    save_tokenizer(folder, tokenizer)
    return save_weights(folder, len(VOCABULARY), seed, **config)


def save_byte_model(folder: Path, **config: Any) -> str:
    """Write a model as :func:`save_model` does, with a tokenizer of bytes and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0, **{byte: i + 1 for i, byte in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    save_tokenizer(folder, tokenizer, CHAT_TEMPLATE)
    return save_weights(folder, len(vocabulary), 0, **config)


def save_tokenizer(folder: Path, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
    """Write a tokenizer whose token 0 ends a sequence."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)


def save_weights(folder: Path, vocab_size: int, seed: int, **config: Any) -> str:
    """Write a random Qwen3; the folder's name."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # vLLM's attention on the CPU has none smaller
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    }
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**sizes | config)).save_pretrained(folder)
    return str(folder)


def make_completion(token_ids: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0) -> Sample:
    """A completion of the given tokens; it is truncated unless token 0 ends it."""
    characters = {token: character for character, token in VOCABULARY.items() if token}
    return Sample(
        token_ids=token_ids,
        logprobs=[0.0] * len(token_ids) if logprobs is None else logprobs,
        weight_versions=[version] * len(token_ids),
        text="".join(characters[token] for token in token_ids if token),
        finish_reason="stop" if token_ids and token_ids[-1] == 0 else "length",
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def in_this_process(function: Function) -> Function:
    """Keep a reward function from being pickled, so that it needs no process of its own."""
    function.__qualname__ = f"<locals>.{function.__name__}"
    return function


@in_this_process
async def share_of_ones(completion: str) -> float:
    """A reward that a random model gets some of."""
    return completion.count("1") / max(len(completion), 1)


Start: TypeAlias = tuple[Prompt, int, Sampling]
"""What to sample after, the number of the sample, and how."""


class ActorSampler(TrajectorySampler):
    """Samples from the module's own actor; what it samples depends on weights, prompt and weight version alone."""

    def __init__(self, module: RLModule) -> None:
        self.module = module

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: Sampling, on_completed: OnCompleted | None = None
    ) -> list[list[Trajectory]]:
        """Sample ``num_samples`` completions of each prompt."""
        starts = [(prompt, number, sampling.of(prompt)) for prompt in prompts for number in range(num_samples)]
        samples = iter(self.complete(starts))
        return single_turns(prompts, [[next(samples) for _ in range(num_samples)] for _ in prompts])

    @torch.no_grad()
    def complete(self, starts: Sequence[Start]) -> list[Sample]:
        """Sample after each prompt with these numbers, all at the same time."""
        version = self.module.weight_version
        draws = [torch.Generator().manual_seed((version * 1000 + p.index) * 1000 + n) for p, n, _ in starts]
        token_ids = [list(prompt.token_ids) for prompt, *_ in starts]
        logprobs: list[list[float]] = [[] for _ in starts]
        going = list(range(len(starts)))
        while going:
            for place, logits in zip(going, self._predict([token_ids[place] for place in going]), strict=True):
                temperature = starts[place][2].temperature
                chances = (logits / (temperature or 1.0)).softmax(-1)
                drawn = chances.multinomial(1, generator=draws[place]) if temperature else logits.argmax()
                token = int(drawn)
                token_ids[place].append(token)
                logprobs[place].append(chances[token].log().item())
            going = [p for p in going if token_ids[p][-1] != 0 and len(logprobs[p]) < starts[p][2].max_new_tokens]
        return [
            make_completion(tokens[-len(of_tokens) :], of_tokens, version)
            for tokens, of_tokens in zip(token_ids, logprobs, strict=True)
        ]

    def _predict(self, sequences: list[list[int]]) -> torch.Tensor:
        """Logits of the token that comes next in each: [N, V]."""
        actor = self.module.loaded_actor
        lengths = torch.tensor([len(tokens) for tokens in sequences])
        ends = lengths.cumsum(0)
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
        bounds = torch.cat([torch.zeros(1), ends]).to(actor.device, torch.int32)
        inputs = packed_inputs(tokens.to(actor.device), positions.to(actor.device), bounds, int(lengths.max()))
        logits: torch.Tensor = actor(**inputs).logits
        return logits[0, ends.to(logits.device) - 1].float().cpu()


class UseSampler(Callback):
    """Gives the module something to generate with, as VLLMRollout does."""

    def __init__(self, make: Callable[[RLModule], Any] = ActorSampler, **sampling: Any) -> None:
        self.make = make
        self.sampling = Sampling(**{"max_new_tokens": MAX_NEW_TOKENS} | sampling)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called before the actor is loaded."""
        assert isinstance(pl_module, RLModule)
        pl_module.sampler = self.make(pl_module)
        pl_module.sampling = self.sampling


class GenerateInWorkers(UseSampler):
    """The same where a controller's workers are, which have the actor."""

    runs_in = "workers"


Algorithm = TypeVar("Algorithm", bound=RLModule)


def make_algorithm(algorithm: type[Algorithm], model: str | Path, **kwargs: Any) -> Algorithm:
    """An algorithm, on two samples of four prompts a step, with a reward that a random model gets some of."""
    rewards = [RewardFunction(share_of_ones)]
    usual: dict[str, Any] = {"rewards": rewards, "prompts_per_step": 4, "samples_per_prompt": 2, "lr": 1e-3}
    return algorithm(str(model), **usual | kwargs)


def make_grpo(model: str | Path, **kwargs: Any) -> GRPO:
    """The first of algorithms, as :func:`make_algorithm`."""
    return make_algorithm(GRPO, model, **kwargs)


def write_sums(folder: Path) -> str:
    """Sixteen prompts of three or four characters."""
    rows = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(4) for b in range(4)]
    path = folder / "sums.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def bare_trainer(folder: Path, max_steps: int, *callbacks: Callback, **kwargs: Any) -> Trainer:
    """The real Trainer, without a console."""
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": max_steps,
        "max_epochs": -1,
        "callbacks": list(callbacks),
        "logger": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "default_root_dir": folder,
    }
    return Trainer(**arguments | kwargs)


def make_trainer(folder: Path, max_steps: int, *callbacks: Callback, **kwargs: Any) -> Trainer:
    """Return :func:`bare_trainer`'s Trainer with a sampler of the actor, unless a callback is a rollout callback."""
    if not any(isinstance(callback, UseSampler) for callback in callbacks):
        callbacks = (UseSampler(), *callbacks)
    return bare_trainer(folder, max_steps, *callbacks, **kwargs)


def make_data(folder: Path, **kwargs: Any) -> PromptDataModule:
    """Sixteen sums, in their order."""
    return PromptDataModule(write_sums(folder), max_prompt_tokens=16, shuffle=False, **kwargs)


def make_batch(groups: Sequence[Sequence[Sequence[int]]], prompt: Sequence[int] = (1, 2)) -> RolloutBatch:
    """A batch of completions given by their tokens, all after the same prompt tokens."""
    prompts = [Prompt(i, "01", list(prompt), {}) for i in range(len(groups))]
    return RolloutBatch.pack(single_turns(prompts, [[make_completion(tokens) for tokens in group] for group in groups]))


def copy_weights(module: RLModule) -> dict[str, torch.Tensor]:
    """The actor's weights now."""
    return {name: weight.detach().clone() for name, weight in module.named_weights()}


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of each parameter on the host, from the shards of all ranks, which all call it."""

    def whole(weight: torch.Tensor) -> torch.Tensor:
        if not isinstance(weight, DTensor):
            return weight
        there: Any = weight.to(weight.device_mesh.device_type)  # from the host, if it is kept there
        full: torch.Tensor = there.full_tensor()
        return full

    return {name: whole(weight).detach().to("cpu", copy=True) for name, weight in model.named_parameters()}
