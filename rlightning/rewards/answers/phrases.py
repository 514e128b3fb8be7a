"""Finds answers that sentences state, such as "the answer is 18", "so (B) is correct", "yes, it is"."""

# ruff: noqa: RUF001 (a full-width colon)

import re

from rlightning.rewards.answers.kinds import Answer, Based, Choice, Listing, Relation, Text, is_time_of_day
from rlightning.rewards.answers.notation import normalize
from rlightning.rewards.answers.numbers import Number
from rlightning.rewards.answers.prose import MATH, joined_math, last_value, leading_value
from rlightning.rewards.answers.reading import CONDITION, read_answer, words_of

MAX_END = 4000
"""Number of characters at the end of a text in which an unmarked answer is searched."""
MAX_ITEM_WORDS = 3
"""Maximum number of words of an item in a list of words; a longer item is a sentence."""

DENIED = "\0"
"""Placeholder for a value of which the text says that it is not, or may not be, the answer."""
_SUBJECT = (
    r"(?:(?:final\s+)?(?:answers?|ans)|(?:correct|right|best|my|final) (?:choice|option)"
    r"|(?:solutions|roots|values)(?=[^\n.]*\bare\b))"
)
_VERB = rf"(?:\b(?:is|are|be|was)\b(?!\s+not\b)\s*:?|[:：]|(?={DENIED}))"
PHRASE = re.compile(
    rf"(?:\b{_SUBJECT}\b(?:(?!\banswer)[^\n.:=$\\{DENIED}]){{0,60}}?{_VERB}|\b{_SUBJECT}\s*="
    r"|(?:答案|答)\s*(?:是|为|选|[:：])|选(?=\s*\(?[A-J])|^\W*(?:final\s+)?answer\W*\n)[ \t]*(?:\*\*|__)?[ \t]*",
    re.IGNORECASE | re.MULTILINE,
)
_DENIAL = re.compile(
    r"(?:\b(?:not|nor|never|cannot|neither|maybe|perhaps|possibly|anything but|(?:could|might|may)\s+be)|n['’]t)\b"
    r"(?:\s+(?:be|equal|equals|to|exactly|just|a|the))*\s+"
    r"(?:\$[^$\n]+\$(?!\d)|\\\(.{,200}?\\\)|\S*\d\S*?(?=[.,;:!?)*]*(?:\s|$))|\(?[A-J]\)?(?![\w']))"
)
_EMPHASIS = re.compile(
    r"(?<![\w)\]}*])(\*{1,2}|_)(?=[^\s*_])([^\n*_]{,200}?)(?<=[^\s*_])\1(?![\w*])|(?<!`)`([^`\n]*)`(?!`)"
)
_QUOTED = re.compile(
    r"(?<!\w)(?:“([^“”\n]*)”|„([^„“”\n]*)[“”]|‘([^‘’\n]*)’|«([^«»\n]*)»|‹([^‹›\n]*)›|「([^「」\n]*)」"
    r"|『([^『』\n]*)』|《([^《》\n]*)》|【([^【】\n]*)】|'([^'\n]*)')(?!\w)"
)
_NUMBER_SIGN = re.compile(r"(?<![\w#&\\])[#№]\s?(?=[-+]?\d)")
_LIST_SIGN = re.compile(r"^[ \t]*(?:[-=]{1,2}>|[→⇒⟹⟶➔➜—]|[*•‣◦▪●](?=\s))[ \t]*", re.MULTILINE)
"""A bullet or an arrow at the start of a line."""
_NO_VALUE = re.compile(
    r"\W*(?:(?:less|more|fewer|greater|smaller|larger|bigger|higher|lower|other)\s+than|no\s+(?:more|less|fewer)"
    r"|at\s+(?:most|least)|between|from|up\s+to|over|under|above|below|hardly|barely|nearly|almost"
    r"|twice|half|double|triple|an?\s+(?:multiple|divisor|factor|power|root)\s+of)\b",
    re.IGNORECASE,
)
_GOES_ON = re.compile(
    r"\W*[\d.,/]*\d\s*(?:(?:or|and)\s+(?:more|less|fewer|greater|higher|lower|above|below|up|so|an?\s)|to\s+(?:the\b|\W*\d)"
    r"|(?:squared|cubed|factorial|if|unless)\b|(?:times|plus|minus|over|divided\s+by)\s+\W*\d)"
)
_NEGATION = re.compile(
    r"(?:(?:\b(?:not|never|cannot)|n['’]t)\s+(?:think|believe|say|claim|mean|true|correct|certain|sure|the\s+case)"
    r"|\b(?:doubt|wrong|false|untrue)\s+(?:that|whether|if|to))\b(?:(?!\b(?:so|thus|hence|therefore|but)\b)[^.,;:!?\n])*$"
)
"""A negation or a doubt in the same clause before "the answer is"."""
_LEAD_IN = re.compile(
    r"(?:(?:therefore|thus|so|approximately|about|simply|just|equal to|exactly|option|choice|either|letter)\b[\s:]*)+",
    re.IGNORECASE,
)
_CHOICE = re.compile(r"\(?([A-J])(?:\)?[.:)]?\s*$|[).:](?=\s)|(?=\s*[,;(-]|\s+(?:is|\$?\d)))")
_LETTER = r"(?:\*\*|\\text\s*\{)?\(?([A-J])\)?\}?(?:\*\*)?"
_STATED_CHOICE = re.compile(
    r"(?:^|,|\b(?i:option|choice|letter|answer|choose|select|pick|go with|therefore|thus|hence|so|be|is|it['’]s)\b)"
    rf"[\s,:]*{_LETTER}"
    r"(?:\s+is\s+(?:the\s+)?(?:only\s+)?(?:correct|right|best|true|answer)\b.*)?[\s.!]*$"
)
_TRUTH = re.compile(
    r"\W*(?:(?:so|thus|therefore|hence)\W+)?(yes|no)\b(?!\s+(?:and|or)\b)(?:[^\d]*|\W.*\b(?:because|since|as)\b.*)|[^\d]*\bis\s+(true|false)\W*",
    re.IGNORECASE,
)
_FUNCTIONS = frozenset({"sin", "cos", "tan", "log", "ln", "sqrt", "and", "or", "pi"})
_IN_TEXT = re.compile(r"\\text[a-z]*\s*\{[^{}]*\}|\\math[a-z]*\s*\{[^{}]*\}")
_SENTENCE_END = re.compile(r"(?<=[^\s.])[.!?。](?=\s|$|\*)")
_REASON = re.compile(r"\s+(?:because|since|which|as|where)\s")


def find_unmarked(text: str) -> Answer | None:
    """Return the answer that a text states without a mark, as after "the answer is"; None if none is found."""
    text = _clean(text[-MAX_END:])
    phrases = list(PHRASE.finditer(text))
    for phrase in reversed(phrases):
        answer = None if _NEGATION.search(text, 0, phrase.start()) else _read_phrase(text[phrase.end() :])
        if answer is not None:
            return answer
    last = phrases[-1] if phrases else None
    if last and (_NEGATION.search(text, 0, last.start()) or _is_denied(text[last.end() :])):
        return None
    whole = None if "\n" in text.strip() else read_answer(text)
    truth = _stated_truth(text)
    if truth is not None:
        return truth
    if whole is not None and not isinstance(whole, Text) and not is_prose(text, whole):
        is_computation = isinstance(whole, Relation) and whole.signs[-1] == "=" and re.match(r"[$\d]", whole.sides[0])
        return last_value(text) if is_computation else whole
    if isinstance(whole, Text) and _NO_VALUE.match(text):
        return whole
    return _stated_choice(text) or last_value(text) or whole


def _clean(text: str) -> str:
    """Remove Markdown, quotes, arrows, number signs, special tokens at the end and negated values from a text."""
    text = re.sub(r"(?:\s*<[|/]?\w+\|?>)+\s*$", "", text)
    text = re.sub(r"^\s*#+\s+", "", _EMPHASIS.sub(r"\2\3", text), flags=re.MULTILINE)
    text = _LIST_SIGN.sub("", _NUMBER_SIGN.sub("", _QUOTED.sub(lambda match: match[match.lastindex or 0], text)))
    text = re.sub(r"\b(?:minus|negative)\s+(?=\\?\$?\d)", "-", text)
    return re.sub(rf"\({DENIED}[^()\n]*\)", "", _DENIAL.sub(DENIED, text))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.split("\n") if line.strip(" \t*_#>-")), "")


def _is_denied(text: str) -> bool:
    line = _first_line(text)
    return DENIED in line or bool(_NO_VALUE.match(line) or _GOES_ON.match(line))


def _read_phrase(text: str) -> Answer | None:
    """Parse the text after "the answer is", up to the end of the line or sentence."""
    line = _first_line(text)
    block = text.lstrip() if re.match(r"\s*(?:\$\$|\\\[)", text) else line
    math = MATH.search(block)
    if math and not re.search(r"\w", re.sub(r"\bto\b", "", _LEAD_IN.sub("", block[: math.start()]))):
        return joined_math(block, math)
    sentence = _REASON.split(_SENTENCE_END.split(line, maxsplit=1)[0], maxsplit=1)[0].strip(" *_`'\"")
    sentence = re.sub(rf"^{_LEAD_IN.pattern}", "", sentence.replace("**", "").replace("`", ""), flags=re.IGNORECASE)
    if _is_denied(sentence) and DENIED not in sentence:
        return None
    whole = read_answer(sentence.replace(DENIED, ""))
    if whole is not None and not isinstance(whole, Text) and not is_prose(sentence, whole):
        return whole
    if isinstance(whole, Text) and is_time_of_day(whole):
        return whole
    value = leading_value(normalize(sentence))
    if value is not None:
        return read_answer(value)
    choice = _CHOICE.match(sentence)
    if choice:
        return Choice(choice[1])
    return whole if isinstance(whole, Text) and not re.search(r"\d", sentence) else last_value(sentence) or whole


def _last_sentence(text: str) -> str:
    parts = [part for part in _SENTENCE_END.split(text.strip()) if part.strip()]
    return parts[-1].strip().split("\n")[-1].strip() if parts else ""


def _stated_choice(text: str) -> Answer | None:
    """Return the choice that the last sentence states."""
    match = _STATED_CHOICE.search(_last_sentence(text))
    return Choice(match[1].upper()) if match else None


def _stated_truth(text: str) -> Answer | None:
    """Return the yes, no, true or false that the last sentence states."""
    truth = _TRUTH.fullmatch(_last_sentence(text))
    return Text(truth[1] or truth[2]) if truth else None


def is_prose(text: str, answer: Answer) -> bool:
    """Return whether a text contains words beyond those of ``answer``, as a sentence does."""
    if isinstance(answer, Number | Choice | Based):
        return False
    # In a formula, two letters after a digit are a product, and dx a differential.
    plain = re.sub(r"(?<=\d)[a-z]{2}(?![a-z])|\bd[a-z]\b", "", _IN_TEXT.sub("", CONDITION.sub("", text)))
    words = [word for word in words_of(plain) if word.lower() not in _FUNCTIONS]
    if isinstance(answer, Listing) and isinstance(answer.items[0], Text):
        is_words = all(isinstance(item, Text) for item in answer.items) or re.fullmatch(
            r"[A-Z]\w* \d+", answer.items[0].words
        )
        return not is_words or len(words) > MAX_ITEM_WORDS
    return bool(words)
