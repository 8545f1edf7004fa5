"""Supervised fine-tuning: rollouts whose completions are the data's own solutions, so that nothing is sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_grpo.data.alphabet import check_alphabet
from lit_grpo.errors import UserError
from lit_grpo.rollout.generator import PolicySource
from lit_grpo.types import Completion, Prompt, Rollout, Sampling
from lit_grpo.utils.spelling import nearest
from lit_grpo.utils.text import completion_text

_ANSWER, _SOLUTION = "{answer}", "{solution}"


@dataclass
class DemonstrationFormat:
    r"""How a row becomes the completion that supervised fine-tuning teaches (``objective: {recipe: sft}``).

    Attributes:
        column: column with the whole solution; None: the column ``solution`` where ``template`` has ``{solution}``.
        template: text around ``{answer}``, the gold answer, and ``{solution}``, the text of ``column`` without GSM8K's
            last line ``#### 42``: ``The answer is {answer}.`` or
            ``<reasoning>{solution}</reasoning><answer>{answer}</answer>``. Other braces are left as they are, so
            ``\boxed{{answer}}`` needs no care. None: the text of ``column`` as it is, or the gold answer alone.
        on_long: a solution of more than ``data.sampling.max_new_tokens`` tokens, end of sequence included, ends the run
            (``error``) or is left out with its prompt and counted (``drop``).
    """

    column: str | None = None
    template: str | None = None
    on_long: Literal["error", "drop"] = "error"

    def __post_init__(self) -> None:
        if self.template is None:
            return
        if _ANSWER not in self.template and _SOLUTION not in self.template:
            raise UserError(
                f"the template {self.template!r} has neither {_ANSWER} nor {_SOLUTION}, so every solution would be "
                "the same",
                where="data.demonstrations.template",
                remedy=f"write {_ANSWER} where the gold answer goes, {_SOLUTION} where the solution goes",
            )
        if self.column is not None and _SOLUTION not in self.template:
            raise UserError(
                f"the template {self.template!r} has no place for the text of the column {self.column!r}",
                where="data.demonstrations",
                remedy=f"write {_SOLUTION} where it goes, or leave column out",
            )

    def text(self, prompt: Prompt, where: str) -> str:
        """Return the solution of a prompt.

        Raises:
            UserError: the prompt's row has none.
        """
        if self.template is None:
            return self._answer(prompt, where) if self.column is None else self._solution(prompt, self.column, where)
        values = {}
        if _ANSWER in self.template:
            values["answer"] = self._answer(prompt, where)
        if _SOLUTION in self.template:
            whole = self._solution(prompt, self.column or "solution", where)
            values["solution"] = _HASHES.sub("", whole).strip()
        # In one pass: a solution may itself hold the text {answer}, which must stay as it is.
        return re.sub(r"\{(answer|solution)\}", lambda slot: values[slot[1]], self.template)

    @staticmethod
    def _answer(prompt: Prompt, where: str) -> str:
        if prompt.answer is None or not prompt.answer.strip():
            raise UserError(
                f"row {prompt.id!r} has no gold answer, and supervised fine-tuning learns from it",
                where=where,
                remedy="fill it in, or name a column of solutions with data.demonstrations.column",
            )
        return prompt.answer

    @staticmethod
    def _solution(prompt: Prompt, column: str, where: str) -> str:
        if column not in prompt.extra:
            close = nearest(column, prompt.extra)
            raise UserError(
                f"there is no column {column!r}; the others are {', '.join(map(repr, prompt.extra)) or 'none'}",
                where=where,
                remedy=f"did you mean {close!r}?" if close else "name one of them in data.demonstrations.column",
            )
        solution = prompt.extra[column]
        if not isinstance(solution, str) or not solution.strip():
            raise UserError(
                f"row {prompt.id!r} has no solution in column {column!r}",
                where=where,
                remedy="fill it in, or remove the row",
            )
        return solution


_HASHES = re.compile(r"^####[^\n]*\s*\Z", re.MULTILINE)
"""GSM8K's last line, which says the gold answer once more."""


def encode_demonstrations(
    form: DemonstrationFormat,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    ends: Sequence[int],
    limit: int,
    locations: Mapping[str, str],
) -> dict[str, tuple[int, ...]]:
    """Encode the solution of every prompt, end of sequence included.

    Args:
        form: how a row becomes a solution.
        prompts: prompts of the training set.
        tokenizer: the policy's tokenizer; the solution is encoded by itself, as a completion would be sampled.
        ends: ids that end a completion; the tokenizer's own is used if it is among them.
        limit: largest number of tokens of a solution.
        locations: file and line of each prompt, for messages.

    Returns:
        Token ids by prompt id, without the solutions that were dropped for their length.

    Raises:
        UserError: a row has no solution, a solution is too long with ``on_long: error``, or all are too long.
    """
    own = tokenizer.eos_token_id
    end = own if own in ends else ends[0]
    encoded: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        where = locations.get(prompt.id) or prompt.id
        text = form.text(prompt, where)
        try:
            ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # tokenizers raise plain Exception
            check_alphabet(tokenizer, text, f"the solution of row {prompt.id!r}", where)
            raise UserError(
                f"the tokenizer cannot take the solution of row {prompt.id!r}: {error}", where=where
            ) from error
        ids = [*ids, end] if ids[-1:] != [end] else ids
        if len(ids) <= limit:
            encoded[prompt.id] = tuple(ids)
        elif form.on_long == "error":
            raise UserError(
                f"the solution of row {prompt.id!r} has {len(ids)} tokens, more than max_new_tokens = {limit}",
                where=where,
                remedy="raise data.sampling.max_new_tokens, or leave such rows out with "
                "data.demonstrations: {on_long: drop}",
            )
    if dropped := len(prompts) - len(encoded):
        if not encoded:
            raise UserError(f"all {dropped} solutions are longer than max_new_tokens = {limit}",
                            where="data.sampling.max_new_tokens", remedy="raise it")  # fmt: skip
        rank_zero_info(f"{dropped} of {len(prompts)} solutions are longer than {limit} tokens and are left out.")
    return encoded


class SupervisedSource:
    """A source of rollouts that gives the solutions of the data instead of samples, for supervised fine-tuning.

    The rollouts have no rewards (``rewards`` is empty, ``reward`` is 1 for each) and no sampler log-probabilities; they
    carry the present policy version, as nothing in them depends on the weights.

    Args:
        solutions: token ids by prompt id.
        policy: gives the version that the rollouts carry.
        tokenizer: decodes the solutions, for callbacks that show texts.
        seed: seed of the run; the order of prompts derives from it.
        end_token_ids: ids that end a solution, and are no part of its text.
    """

    def __init__(
        self,
        solutions: Mapping[str, tuple[int, ...]],
        policy: PolicySource,
        tokenizer: Any,
        seed: int,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self.solutions, self.policy, self.tokenizer, self.seed = solutions, policy, tokenizer, seed
        self.end_token_ids = end_token_ids

    def produce(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        group_size: int,
        *,
        index: int,
        purpose: str = "train",
        positions: Sequence[int | str] | None = None,
        sync: bool = True,
    ) -> Rollout:
        """Make a rollout of the solutions of ``prompts``, one each."""
        if group_size != 1:
            raise ValueError(f"a prompt has one solution, not {group_size}")
        version = self.policy.policy_version
        completions = []
        for i, prompt in enumerate(prompts):
            ids = self.solutions[prompt.id]
            completions.append(Completion(i, 0, ids, (float("nan"),) * len(ids), "stop", version))
        return Rollout(
            index=index,
            prompts=list(prompts),
            completions=completions,
            texts=[completion_text(self.tokenizer, c.token_ids, self.end_token_ids) for c in completions],
            rewards={},
            reward=torch.ones(len(prompts)),
            group_size=1,
        )

    @property
    def policy_version(self) -> int:
        """The learner's own version: solutions are as new as the newest weights."""
        return self.policy.policy_version

    def sync(self) -> float:
        """Do nothing: there is no engine to hand weights to."""
        return 0.0

    def sleep(self) -> None:
        """Do nothing: there is no engine that holds memory."""
