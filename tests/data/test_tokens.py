"""Borders between special tokens, prompt and completion, with tokenizers of the usual kinds in small."""

from typing import Any

import pytest
from prompt_files import make_byte_tokenizer, make_metaspace_tokenizer

from rlightning.data.tokens import check_characters, cut_prompt, tokenize
from rlightning.errors import ConfigError

BOS, EOS, SPACE, A, COLON, T, SPACE_A, SPACE_T = range(8)


class WithoutOffsets:
    """A tokenizer written in Python: the same tokens, but no offsets."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id

    def __call__(self, texts: list[str], **options: Any) -> Any:
        return self.tokenizer(texts, **options)


@pytest.mark.parametrize("has_offsets", [True, False])
@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("way", ["metaspace", "normalizer"])  # of Mistral, of Llama 2
@pytest.mark.parametrize(
    ("prompt", "completion", "prompt_ids", "completion_ids"),
    [
        ("A:", "T", [BOS, SPACE_A, COLON], [T]),
        ("A:", " T", [BOS, SPACE_A, COLON], [SPACE_T]),
        ("A: ", "T", [BOS, SPACE_A, COLON], [SPACE_T]),  # a token of both belongs to the completion
        ("A:", "", [BOS, SPACE_A, COLON], []),
        ("A:", "TA", [BOS, SPACE_A, COLON], [T, A]),
    ],
)
def test_completion_of_sentencepiece_is_split_from_the_whole_text(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], way: str, adds_eos: bool,
    has_offsets: bool,
) -> None:  # fmt: skip
    tokenizer = make_metaspace_tokenizer(adds_eos=adds_eos, way=way)
    assert tokenizer("T", add_special_tokens=False)["input_ids"] == [SPACE_T]  # what would be learned otherwise
    used: Any = tokenizer if has_offsets else WithoutOffsets(tokenizer)
    (tokens,) = tokenize(used, [prompt], [completion], has_special_tokens=False)
    assert (tokens.prompt, tokens.completion) == (prompt_ids, completion_ids)


@pytest.mark.parametrize(
    ("prompt", "completion"), [("né", "é"), ("n ", "é\n"), ("n", " 🙂"), ("🙂", "🙂 "), ("n", "\n")]
)
def test_completion_of_byte_level_characters_is_whole(prompt: str, completion: str) -> None:
    tokenizer = make_byte_tokenizer()  # a token a byte
    (tokens,) = tokenize(tokenizer, [prompt], [completion], has_special_tokens=False)
    assert len(tokens.prompt) == len(prompt.encode())
    assert len(tokens.completion or []) == len(completion.encode())


@pytest.mark.parametrize(
    ("text", "adds_eos", "has_special_tokens", "ids", "dropped"),
    [
        ("A:", False, False, [BOS, SPACE_A, COLON], (False, False)),
        ("A:", True, False, [BOS, SPACE_A, COLON], (False, True)),
        ("<s>A:", False, False, [BOS, A, COLON], (True, False)),
        ("<s>A:", True, False, [BOS, A, COLON], (True, True)),
        ("<s><s>A:</s>", True, False, [BOS, A, COLON], (True, True)),
        ("<s>A:", True, True, [BOS, A, COLON], (False, False)),
        ("<s>A:</s>", True, True, [BOS, A, COLON, EOS], (False, False)),  # a chat template may end a turn so
        ("<s>", False, False, [BOS], (True, False)),
    ],
)
def test_prompt_has_one_bos_and_no_eos(
    text: str, adds_eos: bool, has_special_tokens: bool, ids: list[int], dropped: tuple[bool, bool]
) -> None:
    tokenizer = make_metaspace_tokenizer(adds_eos=adds_eos)
    (tokens,) = tokenize(tokenizer, [text], None, has_special_tokens=has_special_tokens)
    assert tokens.completion is None
    assert tokens.prompt == ids
    assert (tokens.has_dropped_bos, tokens.has_dropped_eos) == dropped


@pytest.mark.parametrize(
    ("ids", "limit", "kept"),
    [
        ([BOS, A, COLON, T], 3, [BOS, COLON, T]),
        ([BOS, A, COLON, T], 1, [BOS]),
        ([A, COLON, T], 2, [COLON, T]),
        ([A, BOS, T], 2, [BOS, T]),
    ],
)
def test_cut_prompt_keeps_its_bos(ids: list[int], limit: int, kept: list[int]) -> None:
    tokenizer = make_metaspace_tokenizer()
    assert cut_prompt(tokenizer, ids, limit)[0] == kept
    assert cut_prompt(make_byte_tokenizer(), [5, 6, 7], 2) == ([6, 7], [6, 7])  # no BOS token at all


def test_a_lone_surrogate_is_named_by_its_place() -> None:
    check_characters("a\N{GRINNING FACE}b", "x.jsonl, line 2", "prompt")
    with pytest.raises(
        ConfigError, match=r"x\.jsonl, line 2: the prompt holds the lone surrogate U\+D83D at character 3"
    ):
        check_characters("ab\ud83d", "x.jsonl, line 2", "prompt")
