"""What a run reads of a model's files, and how an engine that has read something else is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_models import bare_config, save_model

from rlightning.errors import EngineError
from rlightning.rollout.engine_config import EngineConfig
from rlightning.rollout.engine_facts import EngineFacts, check_facts, make_facts
from rlightning.rollout.model_files import ModelFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(save_model(tmp_path / "model"))


def write(path: Path, **values: Any) -> None:
    """Set keys of a JSON file, which need not be there."""
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def facts_of(files: ModelFiles | None, **changes: Any) -> EngineFacts:
    """Return the facts of an engine that has read ``files``."""
    assert files is not None
    facts: dict[str, Any] = {"dtype": "torch.float32", "tensor_parallel_size": 1, "device": "cpu", "max_model_len": 64}
    return make_facts(files=dict(files.facts), **facts | changes)


def config_of(folder: Path, **kwargs: Any) -> EngineConfig:
    """Return the configuration of a run that reads the folder now."""
    arguments = {"model": str(folder), "max_model_len": 64}
    return bare_config(folder / "engine.log", engine_args=arguments, files=ModelFiles.read(str(folder)), **kwargs)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": 5}, {}, (0, 5)),  # 0 is the tokenizer's
        ({"eos_token_id": [5, 3]}, {}, (0, 3, 5)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (0,)),  # the model's configuration counts without the other alone
        (None, {"eos_token_id": 7}, (0, 7)),
        (None, {"eos_token_id": None}, (0,)),
    ],
)
def test_ends_are_those_of_tokenizer_and_generation(
    generation: dict[str, Any] | None, config: dict[str, Any], ends: tuple[int, ...], folder: Path
) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        write(folder / "generation_config.json", **generation)
    write(folder / "config.json", **config)
    assert ModelFiles.read(str(folder)).end_token_ids == ends


def test_keys_that_change_no_token_do_not_count(folder: Path) -> None:
    before = ModelFiles.read(str(folder)).facts
    write(
        folder / "config.json", use_cache=False, transformers_version="4.0.0", dtype="bfloat16", initializer_range=9.0
    )
    assert ModelFiles.read(str(folder)).facts == before


def test_engine_with_the_runs_files_is_taken(folder: Path) -> None:
    check_facts(config_of(folder), facts_of(ModelFiles.read(str(folder))))


def test_engine_restarted_on_other_files_is_refused(folder: Path) -> None:
    config = config_of(folder)
    write(folder / "config.json", rms_norm_eps=0.5)
    write(folder / "generation_config.json", eos_token_id=[0, 3])
    with pytest.raises(EngineError) as caught:
        check_facts(config, facts_of(ModelFiles.read(str(folder))))
    assert str(caught.value) == (
        "The engine is not for this run. It has rms_norm_eps 0.5, not 1e-06; generation_config.eos_token_id [0, 3], "
        f"not 0; end_token_ids [0, 3], not [0]. The files of {folder} must stay as they were when the run began."
    )


def exchange_tokens(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Another tokenizer of equal size: two characters change places."""
    vocab = tokenizer["model"]["vocab"]
    return {"model": tokenizer["model"] | {"vocab": vocab | {"1": vocab["2"], "2": vocab["1"]}}}


@pytest.mark.parametrize(
    ("file", "changes", "difference"),
    [
        ("tokenizer", exchange_tokens, r"It has tokenizer [0-9a-f]{12}, not [0-9a-f]{12}\. Start"),
        ("generation_config", {"temperature": 0.5}, r"generation_config\.temperature 0\.5, not \S+\. Start"),
        (
            "config",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
            r"rope_theta 123\.0, not [\d.]+\. Start",
        ),
        (
            "config",
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantization_config\.bits 4, not None; quantization_config\.quant_method gptq, not None\. Start",
        ),
    ],
)
def test_served_engine_of_a_changed_copy_is_refused(file: str, changes: Any, difference: str, folder: Path) -> None:
    config = config_of(folder, url="tcp://127.0.0.1:1")
    path = folder / f"{file}.json"
    write(path, **(changes(json.loads(path.read_text())) if callable(changes) else changes))
    with pytest.raises(EngineError, match=difference) as caught:
        check_facts(config, facts_of(ModelFiles.read(str(folder))))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value", "is_same_version", "is_refused"),
    [
        ("quantization_config", {"bits": 4}, False, True),
        ("rope_window", 7, False, True),
        ("my_attention_scale", 2.0, False, True),
        ("another_scale", 2.0, True, True),
        ("another_scale", 2.0, False, False),  # perhaps a key that only the other version has, at its default
        ("another_scale", None, True, False),
    ],
)
def test_key_that_one_side_alone_has_is_compared(
    key: str, value: object, is_same_version: bool, is_refused: bool, folder: Path
) -> None:
    versions = {} if is_same_version else {"transformers": "1.0"}
    without = config_of(folder)
    facts_without = facts_of(without.files, **versions)
    write(folder / "config.json", **{key: value})
    with_key = config_of(folder)
    for config, other in ((without, facts_of(with_key.files, **versions)), (with_key, facts_without)):
        if is_refused:
            with pytest.raises(EngineError, match=rf"It has {key}\S* \S+, not \S+\."):
                check_facts(config, other)
        else:
            check_facts(config, other)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"dtype": "torch.bfloat16"}, "dtype torch.bfloat16, not torch.float32"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2, not 1"),
        ({"max_model_len": 63}, "max_model_len 63, not 64 or more"),
        ({"device": "cuda"}, "device cuda, not cpu"),
    ],
)
def test_engine_that_vllm_has_configured_otherwise_is_refused(
    changes: dict[str, Any], difference: str, folder: Path
) -> None:
    config = config_of(folder, url="tcp://127.0.0.1:1")
    with pytest.raises(EngineError) as caught:
        check_facts(config, facts_of(ModelFiles.read(str(folder)), **changes))
    assert f"tcp://127.0.0.1:1 is not for this run. It has {difference}. Start `rlightning serve`" in str(caught.value)


@pytest.mark.parametrize(
    ("served", "needed", "difference"),
    [
        ((0, None), (8, ["q_proj"]), "room for adapters of rank 0, not 8"),
        ((8, ["q_proj"]), (0, []), "room for adapters of rank 8, not 0"),  # a run without one sends merged weights
        ((8, None), (16, ["q_proj"]), "room for adapters of rank 8, not 16"),
        (
            (8, ["q_proj"]),
            (8, ["down_proj", "k_proj", "q_proj"]),
            "room for adapters of q_proj, not of down_proj, k_proj",
        ),
        ((8, ["o_proj", "q_proj"]), (8, ["q_proj"]), ""),
        ((16, None), (8, ["q_proj"]), ""),
    ],
)
def test_engine_without_room_for_the_runs_adapter_is_refused(
    served: tuple[int, list[str] | None], needed: tuple[int, list[str]], difference: str, folder: Path
) -> None:
    config = config_of(folder, url="tcp://127.0.0.1:1")
    rank, targets = needed
    if rank:
        config.engine_args.update(enable_lora=True, max_lora_rank=rank, lora_target_modules=targets)
    facts = facts_of(config.files, adapter_rank=served[0], adapter_targets=served[1])
    if difference:
        with pytest.raises(EngineError, match=rf"is not for this run\. It has {difference}\. Start `rlightning serve`"):
            check_facts(config, facts)
    else:
        check_facts(config, facts)
