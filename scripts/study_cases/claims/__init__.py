"""The claims of the study."""

from __future__ import annotations

from scripts.study_cases.claims.claim import TWINS, Claim, Runs
from scripts.study_cases.claims.countdown import COUNTDOWN_CLAIMS
from scripts.study_cases.claims.exact import EXACT_CLAIMS
from scripts.study_cases.claims.gtpo import GTPO_CLAIMS
from scripts.study_cases.claims.landscape import LANDSCAPE_CLAIMS
from scripts.study_cases.claims.methods import METHOD_CLAIMS

__all__ = ["CLAIMS", "TWINS", "Claim", "Runs", "find"]

CLAIMS = (*EXACT_CLAIMS, *LANDSCAPE_CLAIMS, *COUNTDOWN_CLAIMS, *METHOD_CLAIMS, *GTPO_CLAIMS)


def find(name: str) -> Claim:
    """Return the claim of this name.

    Raises:
        KeyError: there is none.
    """
    return {claim.name: claim for claim in CLAIMS}[name]
