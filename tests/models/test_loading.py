import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled
from safetensors.torch import load_file, save_file
from tiny import refused
from tiny_models import make_sequences, packed_inputs, save_tiny
from tokenizers import Tokenizer, models
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig, PreTrainedTokenizerFast
from transformers.utils.logging import enable_progress_bar, is_progress_bar_enabled

from rlightning.errors import ConfigError
from rlightning.models import hold_as_computed, load_config, load_policy, load_tokenizer, max_model_length, save_policy
from rlightning.models.layers import decoder_layers
from rlightning.models.policy import without_loading_bar
from rlightning.models.whole_policy import load_frozen_policy
from rlightning.parallel.sharding import named_weights


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A tokenizer of digits."""
    vocabulary = {"<eos>": 0, **{str(digit): digit + 1 for digit in range(10)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])), eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.long
def test_what_is_saved_is_what_transformers_loads(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_tiny("qwen3", tmp_path / "source", dtype, head_dim=8, tie_word_embeddings=tied)
    tokenizer = save_tokenizer(tmp_path / "source")
    # Not a few models come with this contradiction, which transformers reads and then refuses to write.
    (tmp_path / "source" / "generation_config.json").write_text('{"temperature": 0.6, "do_sample": false}')
    policy = load_policy(source)
    assert policy.dtype == torch.float32
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    folder = tmp_path / "new" / "saved"
    save_policy(policy, tokenizer, folder, dtype=load_config(source).dtype)
    loaded: Any
    info: dict[str, Any]
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)  # type: ignore[misc]
    assert not any(info.values())
    assert loaded.dtype == dtype
    assert loaded.config.dtype == dtype and loaded.config.tie_word_embeddings == tied
    weights = policy.state_dict()
    assert all(torch.equal(value, weights[name].to(dtype)) for name, value in loaded.state_dict().items())
    names = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert ("lm_head.weight" in names) != tied
    assert loaded.generation_config.temperature == 0.6
    assert AutoTokenizer.from_pretrained(folder)("12").input_ids == [2, 3]
    # It is still the policy that trains: masters, packed attention.
    assert policy.dtype == torch.float32 and policy.config.dtype != torch.bfloat16
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]
    load_policy(str(folder))


def test_a_failure_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(save_tiny("llama", tmp_path / "source"))
    tokenizer = save_tokenizer(tmp_path / "source")
    folder = tmp_path / "saved"
    save_policy(policy, tokenizer, folder, dtype=None)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)

    def fail(path: Path) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "save_pretrained", fail)
        with pytest.raises(OSError, match="No space left"):
            save_policy(policy, tokenizer, folder, dtype=None)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]
    save_policy(policy, tokenizer, folder, dtype=None)
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "source"]


def test_dropout_is_gone(tmp_path: Path) -> None:
    folder = save_tiny("gpt2", tmp_path, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    policy = load_policy(folder)
    assert policy.training
    assert all(module.p == 0 for module in policy.modules() if isinstance(module, torch.nn.Dropout))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{folder}/modle", r"is not a folder, nor can it be a hub name\. Did you mean 'model'\?"),
        ("./nowhere", "is not a folder, nor can it be a hub name"),
        ("runs/gone/hf", "is not a folder, nor can it be a hub name"),
        ("~/nowhere", "is not a folder, nor can it be a hub name"),
        ("/nowhere/at/all", "is not a folder, nor can it be a hub name"),
        ("a b", r"model='a b' has no readable config\.json"),
        ("", r"model='' has no readable config\.json"),
        ("{folder}/empty", r"has no readable config\.json: Unrecognized model"),
    ],
)
def test_missing_model_is_refused(model: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "empty").mkdir()
    with refused(message):
        load_config(model.format(folder=tmp_path))


def test_near_folder_is_named_without_hubs_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    monkeypatch.setattr("rlightning.models.policy.read_config", refuse)
    with pytest.raises(
        ConfigError, match=r"^model='models/n' is not a folder, nor .* mean the folder 'model'\?$"
    ) as error:
        load_config("models/n")
    assert "couldn't" not in str(error.value)


def test_loading_draws_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    enable_progress_bar()
    load_policy(save_tiny("qwen3", tmp_path))
    assert "Loading" not in capsys.readouterr().err
    assert is_progress_bar_enabled() and not are_progress_bars_disabled()
    with without_loading_bar():
        assert not is_progress_bar_enabled() and not are_progress_bars_disabled()


def test_near_folders_are_named_not_all(tmp_path: Path) -> None:
    for name in ("qwen-small", "qwen-large", *(f"data-{number:02}" for number in range(10, 40))):
        (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=r"Did you mean 'qwen-small'\?$"):
        load_config(f"{tmp_path}/qwen-smal")
    with pytest.raises(ConfigError) as caught:
        load_config(f"{tmp_path}/nope")
    listed = str(caught.value).partition("Choose from: ")[2]
    assert listed.endswith(", and 24 more.") and len(listed.split(", ")) == 9


def test_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    with refused(f"model='{folder}' has no readable tokenizer: "):
        load_tokenizer(folder)


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_neox", "gemma2"])
def test_tokenizer_that_transformers_makes_up_is_refused(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    # A chat model's folder may have this file without the tokens themselves.
    added = {"1": {"content": "<|im_start|>", "special": True}, "2": {"content": "<tool>", "special": False}}
    for content in (None, {"added_tokens_decoder": added}):
        if content is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
        with refused(r"has no tokenizer: none of its files has tokens\. Copy"):
            load_tokenizer(str(tmp_path))


def test_missing_and_broken_weights(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path, tie_word_embeddings=False)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of its weights, such as 'lm_head\.weight'"):
        load_policy(folder)
    file.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="has no readable weights"):
        load_policy(folder)
    file.unlink()
    with refused("has no readable weights"):
        load_policy(folder)


def test_max_model_length_is_the_configs_positions(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    assert max_model_length(load_config(folder)) == 64
    assert max_model_length(BloomConfig()) > 1_000_000  # ALiBi has no limit


@pytest.mark.parametrize("is_autocast", [False, True])
def test_layers_add_up_in_the_dtype_of_the_forward(is_autocast: bool, tmp_path: Path) -> None:
    policy = load_policy(save_tiny("qwen3", tmp_path))
    seen: list[torch.dtype] = []
    for layer in decoder_layers(policy):
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        policy(**packed_inputs(make_sequences())).logits.sum().backward()
    assert seen == [torch.bfloat16 if is_autocast else torch.float32] * len(decoder_layers(policy))
    assert all(parameter.grad is None or parameter.grad.dtype == torch.float32 for parameter in policy.parameters())


def test_routers_biases_are_weights_of_their_dtype(tmp_path: Path) -> None:
    """Rounded to bfloat16, 1.001 and 1 would be the same expert's."""
    policy = load_policy(save_tiny("glm4_moe", tmp_path / "source"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    biases = dict(named_weights(policy))[name]
    biases.copy_(torch.tensor([1.0, 1.001, 0.0, -1.0]))
    save_policy(policy, save_tokenizer(tmp_path / "source"), tmp_path / "saved", dtype=torch.bfloat16)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(saved.pop(name), biases)
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    assert torch.equal(dict(named_weights(load_policy(str(tmp_path / "saved"))))[name], biases)


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "gemma3_text", "qwen3_moe"])
def test_a_model_held_as_computed_has_the_same_logits(kind: str, tmp_path: Path) -> None:
    """Norms of Qwen3, a Conv1D, a scaled embedding and experts stay as they were."""
    save_tiny(kind, tmp_path)
    inputs = packed_inputs(make_sequences())
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        policy = load_policy(str(tmp_path))
        hold_as_computed(policy, dtype)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            found.append(policy(**inputs).logits)
    assert torch.equal(*found)
    assert policy.get_output_embeddings().weight.dtype == (torch.float32 if kind == "gemma3_text" else torch.bfloat16)


class LargestFloat32(TorchDispatchMode):
    """Notes the number of elements of the largest float32 tensor that operations return, outside of the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation, and note what it returns."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and not tensor.is_meta:
                self.numel = max(self.numel, tensor.numel())
        return found


FROZEN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8, "tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": True},
    "gpt2": {},
    "gemma3_text": {},
    "qwen3_moe": {},
    "glm4_moe": {"head_dim": 8, "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_policy_equals_one_cast_afterwards(kind: str, stored: torch.dtype, tmp_path: Path) -> None:
    """Experts are in other tensors of the files than of the model; Gemma's embedding has a scale that is in no file."""
    folder = save_tiny(kind, tmp_path, stored, **FROZEN[kind])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    cast = load_policy(folder)
    hold_as_computed(cast, torch.bfloat16)
    read = load_frozen_policy(folder, torch.device("cpu"), torch.float32, torch.bfloat16)
    expected = dict(cast.named_parameters()) | dict(cast.named_buffers())
    found = dict(read.named_parameters()) | dict(read.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    assert {name: weight.dtype for name, weight in found.items()} == {name: w.dtype for name, w in expected.items()}
    assert read.training and read.generation_config.eos_token_id == cast.generation_config.eos_token_id == [0, 3]
    inputs = packed_inputs(make_sequences())
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(read(**inputs).logits, cast(**inputs).logits)


def test_a_frozen_policy_is_nowhere_in_float32(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, torch.bfloat16, head_dim=8, vocab_size=5000)
    with LargestFloat32() as largest:
        load_frozen_policy(folder, torch.device("cpu"), torch.float32, torch.bfloat16)
    assert largest.numel < max(weight.numel() for weight in load_file(tmp_path / "model.safetensors").values()) / 10


def test_frozen_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path, head_dim=8)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refused("NaN or infinite values in 1 of its weights, such as 'model.layers.1.mlp.up_proj.weight'"):
        load_frozen_policy(folder, torch.device("cpu"), torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_architectures_that_mix_sequences_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_tiny("nemotron", tmp_path)
    with refused("NemotronAttention does not tell attention where a sequence ends"):
        load_frozen_policy(folder, torch.device("cpu"), dtype, torch.bfloat16)
