"""The names that a person may have meant by one that is not known: those that are really near, the nearest first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

_MOST_SLIPS = 4.0
"""Slips of a long name beyond which it is another one: every third letter may be wrong, but no more than these."""
_SWAP = 0.5
"""Slips that two letters count which have changed places: the likeliest slip of all."""
_SHORTEST = 3
"""Letters of the shortest word that may stand for a longer name by some of its letters."""
_PARENT = re.compile(r"\.|/|__")


def nearest(word: str, known: Iterable[object]) -> str | None:
    """Return the known name that is most like ``word``, or None if none is really like it.

    >>> nearest("gpro", ["ppo", "dr_grpo", "grpo"]), nearest("gsm8", ["tags", "two_form"])
    ('grpo', None)
    """
    return next(iter(near_names(word, known, 1)), None)


def near_names(word: str, known: Iterable[object], most: int = 2, *, slips_only: bool = False) -> list[str]:
    """Return the known names that are most like ``word`` and equally so, in their own order.

    A name is like a word if few letters have to be put in, left out, replaced or swapped with the next: one of three,
    and no more than four. Failing that, if the word begins it, has the same parts between underscores, or is made of
    its first and some of its other letters in order, as ``bf16`` of ``bfloat16``.

    Args:
        word: what was given.
        known: the names that there are.
        most: length of the list.
        slips_only: leave out names that are no misspelling of the word, such as longer ones that it begins.
    """
    ranked = [(rank, str(name)) for name in known if (rank := _rank(word, str(name), slips_only)) is not None]
    best = min((rank for rank, _ in ranked), default=None)
    return list(dict.fromkeys(name for rank, name in ranked if rank == best))[:most]


def near_files(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the file names that are most like one: by what stands before the ending, in which many are alike.

    Args:
        name: name of a file that is not there.
        known: names of the files that are.
        most: length of the list.
    """
    stems: dict[str, list[str]] = {}
    for one in known:
        stems.setdefault(PurePath(one).stem, []).append(one)
    near = [one for stem in near_names(PurePath(name).stem, stems, most) for one in stems[stem]]
    # Of data.json and data.jsonl the one whose ending is more like what was given.
    return sorted(near, key=lambda one: _distance(PurePath(name).suffix, PurePath(one).suffix))[:most]


def _rank(word: str, name: str, slips_only: bool) -> tuple[int, float, int] | None:
    """Return how far a name is from a word, in an order in which smaller is nearer; None: it is another word."""
    word, name = _without_shared_parents(word, name)
    one, other = _plain(word), _plain(name)
    if not one or not other:
        return None
    if one == other:
        return 0, 0.0, 0
    slips = _distance(one, other)
    # Of two letters one must be right: `a` is no slip of `b`.
    if slips <= min(max(len(one), len(other)) // 3, _MOST_SLIPS) or (slips <= 1 < max(len(one), len(other)) <= 3):
        return (1, slips, 0) if slips < max(len(one), len(other)) else None
    if slips_only or len(one) < 2:
        return None
    if other.startswith(one) and (len(one) >= _SHORTEST or other[len(one)] == "_"):
        return 2, 0.0, len(other) - len(one)
    if len(one) < _SHORTEST:
        return None
    parts, others = set(_parts(word)), set(_parts(name))
    if parts <= others or (others < parts and len(other) >= _SHORTEST):
        return 3, 0.0, abs(len(other) - len(one))
    if one[0] == other[0] and 2 * len(one) >= len(other) and _holds_in_order(other, one):
        return 4, 0.0, len(other) - len(one)
    return None


def _without_shared_parents(word: str, name: str) -> tuple[str, str]:
    """Drop the parents that two keys share: in ``data.lr`` and ``data.val`` nothing is alike but what is right."""
    one, other = re.split(_PARENT, word), re.split(_PARENT, name)
    while len(one) > 1 and len(other) > 1 and one[0] == other[0]:
        one, other = one[1:], other[1:]
    return ".".join(one), ".".join(other)


def _plain(name: str) -> str:
    """Return a name without what people write in different ways: large letters, dashes for underscores."""
    return name.casefold().replace("-", "_").strip(" _")


def _parts(name: str) -> list[str]:
    """Split a name at underscores, dots, dashes, and where a large letter follows a small one."""
    return [part.casefold() for part in re.split(r"[_./\-\s]+|(?<=[a-z0-9])(?=[A-Z])", name) if part]


def _holds_in_order(name: str, letters: str) -> bool:
    rest = iter(name)
    return all(letter in rest for letter in letters)


def _distance(one: str, other: str) -> float:
    """Count the slips between two words: a letter too many, too few or wrong is one, a swap of neighbours half of one.

    >>> _distance("dappo", "dapo"), _distance("gpro", "grpo")
    (1.0, 0.5)
    """
    # Words of such different length are never near, and a list of thousands of names should cost nothing.
    if abs(len(one) - len(other)) > _MOST_SLIPS:
        return float("inf")
    before: list[float] = []
    last = [float(i) for i in range(len(other) + 1)]
    for i, letter in enumerate(one, start=1):
        row = [float(i)]
        for j, there in enumerate(other, start=1):
            slips = min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != there))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == there:
                slips = min(slips, before[j - 2] + (_SWAP if letter != there else 0.0))
            row.append(slips)
        before, last = last, row
    return last[-1]
