"""The reward for an answer that is a number or a formula."""

import threading

import math_verify

TIME_LIMIT = 3
"""Seconds that math-verify may take over one text; a formula that takes longer counts as wrong."""


def numeric_answer(completion: str, answer: object) -> float:
    """1 if the completion's last answer equals the reference as a number or formula, else 0.

    Both are read by math-verify: the last ``\\boxed{...}``, or else the last formula or number. In both, only what
    follows the last ``####`` counts where there is one, as in GSM8K.

    Args:
        completion: what the model wrote.
        answer: the column ``answer``: a number, a formula, or a solution that ends with ``#### 18``.

    Raises:
        ValueError: the reference holds nothing to compare with.
    """
    # math-verify's limits need SIGALRM, which only a main thread has. Elsewhere only the runner's timeout holds.
    limit = TIME_LIMIT if threading.current_thread() is threading.main_thread() else None
    reference = math_verify.parse(_final_part(str(answer)), parsing_timeout=limit)
    if not reference:
        raise ValueError(f"The reference answer {str(answer)[-80:]!r} holds no number and no formula.")
    given = math_verify.parse(_final_part(completion), parsing_timeout=limit)
    return float(math_verify.verify(reference, given, timeout_seconds=limit))


def _final_part(text: str) -> str:
    _, mark, final = text.rpartition("####")
    return final.strip().split("\n")[0] if mark else text
