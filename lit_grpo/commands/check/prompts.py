"""Prompts, tokenizer and verifier: all that can be wrong before a single token is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_grpo.commands.check.result import Result
from lit_grpo.data import PromptFormat
from lit_grpo.rewards import Reward
from lit_grpo.rewards.combine import score_all
from lit_grpo.types import Completion, Prompt, RewardInput, Rollout
from lit_grpo.utils.text import shorten

GOLD_FORMATS = ("{answer}", r"\boxed{{answer}}", "#### {answer}", "The answer is {answer}.", ":{answer}", "={answer}",
                "<answer>{answer}</answer>")  # fmt: skip
"""How a right answer may be written; the first that the verifier takes is used."""
GOLDS = 64


def template(prompts: Sequence[Prompt], form: PromptFormat, tokenizer: Any) -> Result:
    """Whether prompts are chats where the model was trained on chats."""
    lengths = sorted(len(p.token_ids) for p in prompts)
    size = f"{len(prompts)} prompts, median {lengths[len(lengths) // 2]} tokens, longest {lengths[-1]}"
    kind = form.describe(tokenizer)
    values = {"chat": form.uses_chat(tokenizer), "template": kind, "prompts": len(prompts), "longest": lengths[-1],
              "first": prompts[0].id, "rendered": tokenizer.decode(prompts[0].token_ids)}  # fmt: skip
    if warnings := form.warnings(tokenizer):
        return Result("template", "warn", f"{kind}; {'; '.join(warnings)}; {size}",
                      "choose another data.format.chat_template, unless that is meant", values)  # fmt: skip
    if form.chat_template == "none" and getattr(tokenizer, "chat_template", None):
        return Result("template", "warn", f"plain text, though the tokenizer has a chat template; {size}",
                      "set data.format.chat_template: auto, unless that is meant", values)  # fmt: skip
    if form.chat_template == "auto" and not values["chat"]:
        kind = "plain text, the tokenizer has no chat template"
    return Result("template", "pass", f"{kind}; {size}", values=values)


def rendered(results: Sequence[Result], longest: int = 2_000) -> str:
    """The first prompt as the model reads it, special tokens included; empty if no prompt was made."""
    values = next((r.values for r in results if r.name == "template"), None)
    if values is None:
        return ""
    text = values["rendered"]
    if len(text) > longest:
        text = f"{text[: longest // 2]}\n[... {len(text) - longest} characters ...]\n{text[-longest // 2 :]}"
    lines = "\n".join(f"  | {line}" for line in text.split("\n"))
    return f"the first prompt ({values['first']}), as the model reads it:\n{lines}"


def special_tokens(prompts: Sequence[Prompt], tokenizer: Any, ends: Sequence[int]) -> Result:
    """At most one beginning-of-sequence token, there if the tokenizer adds one, and no end token at the end."""
    bos = getattr(tokenizer, "bos_token_id", None)
    leading = [_leading(p.token_ids, bos) for p in prompts]
    closed = [p.id for p in prompts if p.token_ids[-1] in ends]
    values = {"bos": bos, "most_bos": max(leading), "closed": len(closed)}
    if max(leading) > 1:
        worst = prompts[leading.index(max(leading))].id
        return Result("bos", "fail", f"prompt {worst!r} begins with {max(leading)} beginning-of-sequence tokens",
                      "take it out of the template or the text: the tokenizer adds one by itself", values)  # fmt: skip
    if closed:
        return Result("bos", "fail", f"{len(closed)} prompts end in an end-of-sequence token, as {closed[0]!r}",
                      "switch off add_eos_token in tokenizer_config.json, or mend the template", values)  # fmt: skip
    if bos is None:
        return Result("bos", "pass", "the tokenizer has no beginning-of-sequence token", values=values)
    if 0 in leading and _leading(list(tokenizer("a")["input_ids"]), bos):
        return Result("bos", "warn", "the tokenizer puts a beginning-of-sequence token first, the prompts have none",
                      "add it to the chat template ({{ bos_token }})", values)  # fmt: skip
    return Result("bos", "pass", f"{max(leading)} beginning-of-sequence token a prompt", values=values)


def _leading(ids: Sequence[int], token: int | None) -> int:
    """How many of ``token`` the ids begin with."""
    return next((i for i, value in enumerate(ids) if value != token), len(ids)) if token is not None else 0


def round_trip(prompts: Sequence[Prompt], rollout: Rollout, tokenizer: Any, ends: Sequence[int]) -> Result:
    """Text that survives the tokenizer, and completions that are what the engine says they are."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    lost = [p.id for p in prompts if unknown is not None and unknown in p.token_ids]
    golds = {p.answer for p in prompts[:GOLDS] if p.answer}
    unwritable = sorted(gold for gold in golds if _again(gold, tokenizer) != gold.strip())
    bad_end = sum(c.finish_reason == "stop" and (not c.token_ids or c.token_ids[-1] not in ends)
                  for c in rollout.completions)  # fmt: skip
    outside = sum(any(not 0 <= i < len(tokenizer) for i in c.token_ids) for c in rollout.completions)
    same = sum(
        _encode(text, tokenizer) == _without(c.token_ids, ends)
        for c, text in zip(rollout.completions, rollout.texts, strict=True)
    )
    share = same / len(rollout.texts)
    values = {"unknown": len(lost), "unwritable_golds": len(unwritable), "bad_end": bad_end, "outside": outside,
              "reencoded_equal": share}  # fmt: skip
    if lost:
        return Result("round trip", "fail", f"{len(lost)} prompts hold unknown tokens, as {lost[0]!r}",
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
    """Ids without special tokens; None where the tokenizer refuses the text."""
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception:  # tokenizers raise plain Exception
        return None


def _again(text: str, tokenizer: Any) -> str | None:
    ids = _encode(text, tokenizer)
    return None if ids is None else str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def _without(ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    return list(ids[:-1] if ids and ids[-1] in ends else ids)


def verifier(prompts: Sequence[Prompt], rewards: Sequence[Reward], tokenizer: Any, form: str | None) -> list[Result]:
    """Every reward that knows the gold must take it, and must not take that of another prompt."""
    chosen = [p for p in prompts if p.answer][:GOLDS]
    judged: dict[Reward, list[Prompt]] = {}
    for reward in rewards:
        for prompt in chosen:
            judged.setdefault(reward.for_source(prompt.source), []).append(prompt)
    return [_test_verifier(r, mine, tokenizer, form) for r, mine in judged.items() if r.needs_answer]


def _test_verifier(reward: Reward, prompts: Sequence[Prompt], tokenizer: Any, form: str | None) -> Result:
    name = f"verifier {reward.name}" if len(reward.name) < 8 else "verifier"
    answers = [str(p.answer) for p in prompts]
    taken: list[bool] = []
    best = ""
    for candidate in (form,) if form else GOLD_FORMATS:
        now = _accepts(reward, prompts, [candidate.replace("{answer}", a) for a in answers], tokenizer)
        if not best or sum(now) > sum(taken):
            taken, best = now, candidate
        if all(taken):
            break
    values: dict[str, Any] = {"reward": reward.name, "format": best, "golds": len(prompts), "taken": sum(taken)}
    if not any(taken):
        tried = f"as {form!r}" if form else "in any of the usual forms"
        return Result(name, "fail" if form else "warn", f"{reward.name} takes none of {len(prompts)} golds {tried}",
                      "give the form that it wants: --gold-format '<answer>{answer}</answer>'", values)  # fmt: skip
    if not all(taken):
        wrong = prompts[taken.index(False)]
        return Result(name, "fail", f"{reward.name} takes {sum(taken)} of {len(prompts)} golds; not that of "
                      f"{wrong.id!r}: {shorten(answers[taken.index(False)], 40)!r}",
                      "mend the row or choose a verifier that reads it; else such prompts are never right",
                      values)  # fmt: skip
    others = [next((a for a in answers[i + 1 :] + answers[:i] if a.strip() != answers[i].strip()), None)
              for i in range(len(answers))]  # fmt: skip
    pairs = [(p, other) for p, other in zip(prompts, others, strict=True) if other is not None]
    fooled = _accepts(reward, [p for p, _ in pairs], [best.replace("{answer}", o) for _, o in pairs], tokenizer)
    values |= {"wrong": len(pairs), "fooled": sum(fooled)}
    if any(fooled):
        prompt, other = pairs[fooled.index(True)]
        return Result(name, "fail" if sum(fooled) > 0.05 * len(fooled) else "warn",
                      f"{reward.name} takes {sum(fooled)} of {len(fooled)} wrong answers: {shorten(other, 40)!r} for "
                      f"{prompt.id!r}, whose gold is {shorten(str(prompt.answer), 40)!r}",
                      "equal in value? Else the verifier is too lenient and will be exploited", values)  # fmt: skip
    found = f"{reward.name} takes all {len(prompts)} golds as {best!r} and none of {len(pairs)} wrong ones"
    return Result(name, "pass", found, values=values)


def _accepts(reward: Reward, prompts: Sequence[Prompt], texts: Sequence[str], tokenizer: Any) -> list[bool]:
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    batch = []
    for prompt, text in zip(prompts, texts, strict=True):
        encoded = _encode(text, tokenizer)
        if encoded is None:  # no completion of this model can look like that
            return [False] * len(prompts)
        ids = (*encoded, *end)
        batch.append(RewardInput(prompt, Completion(0, 0, ids, (0.0,) * len(ids), "stop", 0), text))
    return [score.value > 0 for score in score_all([reward], batch, "zero")[reward.name]] if batch else []
