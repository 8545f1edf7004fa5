"""maj@k of a list of answers, as people write them down, by the library's estimate from their counts."""

from collections import Counter
from collections.abc import Hashable, Sequence

from lit_grpo.evaluation.estimators import majority


def maj_at_k(answers: Sequence[Hashable | None], correct: Hashable, k: int) -> float:
    """``answers``: one a sample, None where there is none; ``correct``: the right one."""
    sizes = Counter(answers)
    silent = sizes.pop(None, 0)
    return majority(list(sizes.values()), [float(answer == correct) for answer in sizes], silent, [k])[0]
