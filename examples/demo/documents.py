"""The prompts: pages of the language reference that every Python carries, a question on each."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics

# The page a document begins with (others follow until it is long enough), and the question.
QUESTIONS = (
    ("with", "What does the with statement do with an exception?"),
    ("formatstrings", "What does the ',' option signal in a format specification?"),
    ("try", "When is the else clause of a try statement executed?"),
    ("import", "What are the two steps of the basic import statement?"),
    ("class", "What is a class definition?"),
    ("yield", "When is a yield expression used?"),
)
_NAMES = sorted(topics)


def prompts(
    number: int, min_tokens: int, count_tokens: Callable[[str], int]
) -> list[tuple[str, str]]:
    """The first `number` questions, each with a prompt of `min_tokens` tokens or a few more."""
    return [
        (question, fitted(page, question, min_tokens, count_tokens))
        for page, question in QUESTIONS[:number]
    ]


def fitted(page: str, question: str, min_tokens: int, count_tokens: Callable[[str], int]) -> str:
    """The shortest prompt of whole lines, beginning with `page`, that has `min_tokens` tokens."""
    start = _NAMES.index(page)
    names = _NAMES[start:] + _NAMES[:start]
    lines = "\n\n".join(topics[name].strip() for name in names).splitlines()
    low, high = 1, len(lines)
    # Here a token is 3 to 4 letters: more than 8 times as many need not be sent to be counted.
    while high > 2 and sum(map(len, lines[: high // 2])) > 8 * min_tokens:
        high //= 2
    while low < high:
        middle = (low + high) // 2
        if count_tokens(_prompt(lines[:middle], question)) >= min_tokens:
            high = middle
        else:
            low = middle + 1
    return _prompt(lines[:low], question)


def _prompt(lines: list[str], question: str) -> str:
    document = "\n".join(lines)
    return f"{document}\n\nAnswer from the text above, in one sentence. {question}"
