"""Checks of prompts, tokenizer and verifier: all that can be wrong before a single token is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.commands.check.asked_form import asked_forms
from lit_grpo.commands.check.result import Result
from lit_grpo.data import PromptFormat
from lit_grpo.data.chat_template import TURN_MARKS
from lit_grpo.data.doubts import Doubt, shown_prompt
from lit_grpo.rewards import Reward
from lit_grpo.rewards.base import verdicts
from lit_grpo.rewards.combine import score_all
from lit_grpo.types import Completion, Prompt, RewardInput, Rollout
from lit_grpo.utils.text import completion_text, shorten

GOLD_FORMATS = ("{answer}", r"\boxed{{answer}}", "#### {answer}", "The answer is {answer}.", ":{answer}", "={answer}",
                "<answer>{answer}</answer>")  # fmt: skip
"""Ways to write a right answer where the prompts ask for none; the one that the verifier accepts best is used."""
_SHOWN_CHARACTERS = 2_000
"""Most characters of the first prompt that are shown."""
GOLDS = 64
"""Number of gold answers that are tried at most."""


def columns(taken: Sequence[str], doubts: Sequence[Doubt]) -> list[Result]:
    """Show what was read from which column, and check that not most prompts came out the same.

    Args:
        taken: what the sources say, a line each; nothing where there are no columns.
        doubts: what looks wrong with the training prompts.
    """
    for doubt in doubts:
        if doubt.about == "columns":
            return [Result("columns", "warn", "; ".join([*taken, doubt.what]), doubt.remedy)]
    return [Result("columns", "pass", line) for line in taken]


def template(prompts: Sequence[Prompt], form: PromptFormat, tokenizer: Any, doubts: Sequence[Doubt] = ()) -> Result:
    """Check that prompts are chats where the model was trained on chats, and that nothing is twice in them."""
    lengths = sorted(len(p.token_ids) for p in prompts)
    size = f"{len(prompts)} prompts, median {lengths[len(lengths) // 2]} tokens, longest {lengths[-1]}"
    description = form.describe(tokenizer)
    values = {
        "chat": form.uses_chat(tokenizer),
        "template": description,
        "prompts": len(prompts),
        "longest": lengths[-1],
        "first": prompts[0].id,
        "rendered": tokenizer.decode(prompts[0].token_ids),
        "shown": shown_prompt(prompts[0], tokenizer, _SHOWN_CHARACTERS),
    }
    if sentences := form.warnings(tokenizer):
        return Result("template", "warn", f"{description}; {'; '.join(sentences)}; {size}",
                      "choose another data.format.chat_template, unless that is meant", values)  # fmt: skip
    for doubt in doubts:
        if doubt.about == "template":
            return Result("template", "warn", f"{description}; {doubt.what}; {size}", doubt.remedy, values)
    finished = all(any(mark in p.question for mark in TURN_MARKS) for p in prompts)
    if form.chat_template == "none" and finished:
        return Result("template", "pass", f"plain text, and the texts are finished chats; {size}", values=values)
    if form.chat_template == "none" and getattr(tokenizer, "chat_template", None):
        return Result("template", "warn", f"plain text, though the tokenizer has a chat template; {size}",
                      "set data.format.chat_template: auto, unless that is meant", values)  # fmt: skip
    if form.chat_template == "auto" and not values["chat"]:
        description = "plain text, the tokenizer has no chat template"
    return Result("template", "pass", f"{description}; {size}", values=values)


def rendered(results: Sequence[Result]) -> str:
    """Show the first prompt as the model reads it, special tokens included; empty if no prompt was made."""
    return next((str(r.values["shown"]) for r in results if r.name == "template"), "")


def special_tokens(prompts: Sequence[Prompt], tokenizer: Any, ends: Sequence[int], doubts: Sequence[Doubt]) -> Result:
    """Check for one beginning-of-sequence token where the tokenizer adds one, and for no end token at the end."""
    bos = getattr(tokenizer, "bos_token_id", None)
    leading = [_leading(p.token_ids, bos) for p in prompts]
    values = {
        "bos": bos,
        "most_bos": max(leading),
        "closed": sum(p.token_ids[-1] in ends for p in prompts),
    }
    if max(leading) > 1:
        worst = prompts[leading.index(max(leading))].id
        return Result("bos", "fail", f"prompt {worst!r} begins with {max(leading)} beginning-of-sequence tokens",
                      "take it out of the template or the text: the tokenizer adds one by itself", values)  # fmt: skip
    for doubt in doubts:
        if doubt.about == "ends":
            return Result("bos", "fail", doubt.what, doubt.remedy, values)
    if bos is None:
        return Result("bos", "pass", "the tokenizer has no beginning-of-sequence token", values=values)
    if 0 in leading and _leading(list(tokenizer("a")["input_ids"]), bos):
        return Result("bos", "warn", "the tokenizer puts a beginning-of-sequence token first, the prompts have none",
                      "add it to the chat template ({{ bos_token }})", values)  # fmt: skip
    return Result("bos", "pass", f"{max(leading)} beginning-of-sequence token a prompt", values=values)


def _leading(ids: Sequence[int], token: int | None) -> int:
    """Count how many of ``token`` the ids begin with."""
    return next((i for i, value in enumerate(ids) if value != token), len(ids)) if token is not None else 0


def round_trip(
    prompts: Sequence[Prompt], rollout: Rollout, tokenizer: Any, ends: Sequence[int], stop: Sequence[str] = ()
) -> Result:
    """Check that texts survive the tokenizer, and that completions are what the engine says they are.

    Args:
        prompts: the training prompts.
        rollout: completions of some of them.
        tokenizer: the policy's tokenizer.
        ends: ids that end a completion.
        stop: texts that end a completion.
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    unknown_in = [p.id for p in prompts if unknown is not None and unknown in p.token_ids]
    golds = {gold for p in prompts[:GOLDS] for gold in p.golds if gold}
    unwritable = sorted(gold for gold in golds if _round_trip(gold, tokenizer) != gold.strip())
    bad_end = sum(c.finish_reason == "stop" and (not c.token_ids or c.token_ids[-1] not in ends)
                  and not any(text in tokenizer.decode(c.token_ids) for text in stop)
                  for c in rollout.completions)  # fmt: skip
    outside = sum(any(not 0 <= i < len(tokenizer) for i in c.token_ids) for c in rollout.completions)
    same = sum(
        _encode(text, tokenizer) == _without_end(c.token_ids, ends)
        for c, text in zip(rollout.completions, rollout.texts, strict=True)
    )
    share = same / len(rollout.texts)
    values = {"unknown": len(unknown_in), "unwritable_golds": len(unwritable), "bad_end": bad_end, "outside": outside,
              "reencoded_equal": share}  # fmt: skip
    if unknown_in:
        return Result("round trip", "fail", f"{len(unknown_in)} prompts hold unknown tokens, as {unknown_in[0]!r}",
                      "the tokenizer cannot write these texts: mend the rows, or take another model",
                      values)  # fmt: skip
    if unwritable:
        return Result("round trip", "fail", f"{len(unwritable)} gold answers change in the tokenizer, as "
                      f"{unwritable[0]!r}", "the model cannot write them: mend the answers", values)  # fmt: skip
    if bad_end:
        return Result("round trip", "fail", f"{bad_end} completions stopped without an end token",
                      "the end token must be part of a completion: check engine and stop tokens", values)  # fmt: skip
    if outside:
        return Result("round trip", "fail", f"{outside} completions hold ids that the tokenizer does not know",
                      "the model folder mixes a model and another tokenizer", values)  # fmt: skip
    found = "prompts and golds survive the tokenizer"
    if share < 1:
        found += f"; {1 - share:.0%} of completions would get other ids if encoded again, which never happens here"
    return Result("round trip", "pass", found, values=values)


def _encode(text: str, tokenizer: Any) -> list[int] | None:
    """Return the ids without special tokens; None where the tokenizer refuses the text."""
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    # The tokenizers library raises plain Exception.
    except Exception:
        return None


def _round_trip(text: str, tokenizer: Any) -> str | None:
    ids = _encode(text, tokenizer)
    # As rewards see it: special tokens stay, but for the one that ends a completion.
    return None if ids is None else str(tokenizer.decode(ids, skip_special_tokens=False)).strip()


def _without_end(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    return list(ids[:-1] if ids and ids[-1] in ends else ids)


def verifier(prompts: Sequence[Prompt], rewards: Sequence[Reward], tokenizer: Any, form: str | None) -> list[Result]:
    """Check that every reward that compares with the gold accepts it, and rejects that of another prompt."""
    chosen = [p for p in prompts if p.answer][:GOLDS]
    prompts_of: dict[Reward, list[Prompt]] = {}
    for reward in rewards:
        for prompt in chosen:
            prompts_of.setdefault(reward.for_source(prompt.source), []).append(prompt)
    return [_test_verifier(r, own, tokenizer, form) for r, own in prompts_of.items() if r.needs_answer]


def _test_verifier(reward: Reward, prompts: Sequence[Prompt], tokenizer: Any, form: str | None) -> Result:
    name = f"verifier {reward.name}" if len(reward.name) < 8 else "verifier"
    # Of several golds any is right, so each must be taken.
    answers = [gold for p in prompts for gold in p.golds]
    prompts = [p for p in prompts for _ in p.golds]
    asked = () if form else asked_forms([tokenizer.decode(p.token_ids) for p in prompts])
    best, accepted = _best_form(reward, prompts, answers, (form,) if form else asked or GOLD_FORMATS, tokenizer)
    values: dict[str, Any] = {"reward": reward.name, "format": best, "asked": bool(asked), "golds": len(prompts),
                              "taken": sum(accepted)}  # fmt: skip
    if not any(accepted) and asked:
        other, taken = _best_form(reward, prompts, answers, GOLD_FORMATS, tokenizer)
        reads = f", but {sum(taken)} as {other!r}" if any(taken) else ""
        return Result(name, "fail", f"the prompts ask for {best!r}, and {reward.name} takes none of {len(prompts)} "
                      f"golds in that form{reads}", "let both name one form: the prompts in data.format, the reward by "
                      "init_args.extract or pattern; --gold-format if the prompts ask for another one",
                      values)  # fmt: skip
    if not any(accepted):
        forms = f"as {form!r}" if form else "in any of the usual forms"
        return Result(name, "fail" if form else "warn", f"{reward.name} takes none of {len(prompts)} golds {forms}",
                      "give the form that it wants: --gold-format '<answer>{answer}</answer>'", values)  # fmt: skip
    if not all(accepted):
        wrong = prompts[accepted.index(False)]
        return Result(name, "fail", f"{reward.name} takes {sum(accepted)} of {len(prompts)} golds; not that of "
                      f"{wrong.id!r}: {shorten(answers[accepted.index(False)], 40)!r}",
                      "mend the row or choose a verifier that reads it; else such prompts are never right",
                      values)  # fmt: skip
    # For each prompt a wrong answer that looks right: the next gold that differs from its own.
    rights = [{gold.strip() for gold in p.golds} for p in prompts]
    others = [
        next((a for a in answers[i + 1 :] + answers[:i] if a.strip() not in rights[i]), None)
        for i in range(len(answers))
    ]
    pairs = [(p, other) for p, other in zip(prompts, others, strict=True) if other is not None]
    fooled = _accepts(reward, [p for p, _ in pairs], [best.replace("{answer}", o) for _, o in pairs], tokenizer)
    values |= {"wrong": len(pairs), "fooled": sum(fooled)}
    if any(fooled):
        # Different golds may be equal in value, so a few that are taken need a look and no more.
        prompt, other = pairs[fooled.index(True)]
        return Result(name, "fail" if sum(fooled) > 0.05 * len(fooled) else "warn",
                      f"{reward.name} takes {sum(fooled)} of {len(fooled)} wrong answers: {shorten(other, 40)!r} for "
                      f"{prompt.id!r}, whose gold is {shorten(' or '.join(prompt.golds), 40)!r}",
                      "equal in value? Else the verifier is too lenient and will be exploited", values)  # fmt: skip
    asked_for = ", which the prompts ask for," if asked else ""
    found = f"{reward.name} takes all {len(prompts)} golds as {best!r}{asked_for} and none of {len(pairs)} wrong ones"
    return Result(name, "pass", found, values=values)


def _best_form(
    reward: Reward, prompts: Sequence[Prompt], answers: Sequence[str], forms: Sequence[str], tokenizer: Any
) -> tuple[str, list[bool]]:
    """Return the form in which the reward takes most golds, and which ones it takes."""
    best, accepted = "", [False] * len(prompts)
    for candidate in forms:
        texts = [candidate.replace("{answer}", answer) for answer in answers]
        tried = _accepts(reward, prompts, texts, tokenizer)
        # Of forms that do equally well the first one is taken, which is the plainest.
        if not best or sum(tried) > sum(accepted):
            best, accepted = candidate, tried
        if all(accepted):
            break
    return best, accepted


def _accepts(reward: Reward, prompts: Sequence[Prompt], texts: Sequence[str], tokenizer: Any) -> list[bool]:
    # Texts become completions as the engine would return them, with the end token at their end.
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    batch = []
    for prompt, text in zip(prompts, texts, strict=True):
        encoded = _encode(text, tokenizer)
        # No completion of this model can look like a text that its tokenizer refuses, so the answer counts as rejected.
        if encoded is None:
            return [False] * len(prompts)
        ids = (*encoded, *end)
        # As rewards will see it: what the tokenizer cannot write must not be accepted here.
        seen = completion_text(tokenizer, ids, end)
        batch.append(RewardInput(prompt, Completion(0, 0, ids, (0.0,) * len(ids), "stop", 0), seen))
    if not batch:
        return []
    # A reward that raises on such a text has not accepted it, and gets a value of 0.
    found = score_all([reward], batch, "zero")
    scores, verdict = found[reward.name], verdicts([reward], found, [prompt.source for prompt in prompts])
    # A reward without a threshold says only how near an answer comes: it accepts what it gives anything for.
    # One that gives None for it has not accepted it either: NaN is above nothing.
    right = [score.value > 0 for score in scores] if verdict is None else [bool(one) for one in verdict]
    return [accepted and not score.failed for accepted, score in zip(right, scores, strict=True)]
