"""Hold every family of models to its own forward pass: learner layouts, attentions, LoRA, critic, experts, engine.

python scripts/model_families.py                   # all families, table into docs/models.md
python scripts/model_families.py llama deepseek_v3 # these alone, table on the terminal

A cell is ``exact``, ``refused`` (by a UserError whose remedy was then applied and was exact), ``no setting`` (refused
before training, and no setting trains it) or ``wrong``. The exit code is the number of wrong cells, at most 99.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from lit_grpo.engines.transformers.engine import TransformersEngine  # noqa: E402
from lit_grpo.errors import UserError  # noqa: E402
from lit_grpo.policy import Layout, Policy, PolicyConfig  # noqa: E402
from lit_grpo.policy.config import CriticConfig, LoraConfig  # noqa: E402
from lit_grpo.policy.critic import Critic  # noqa: E402
from lit_grpo.policy.forward.policy import backbone, hidden_states  # noqa: E402
from lit_grpo.policy.model.load import load_model, resolve_backend  # noqa: E402
from lit_grpo.types import Request, Sampling  # noqa: E402
from scripts.model_families_cases.families import FAMILIES, save  # noqa: E402

TARGET = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COLUMNS = ("padded", "packed", "shared", "eager", "sdpa", "varlen", "LoRA", "critic", "experts", "gradient", "engine")
SECONDS = 120
EXACT = 2e-4


def _draw(count: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


PROMPTS = [_draw(20, 0)] * 3 + [_draw(5, 1)] * 2
COMPLETIONS = [_draw(n, 10 + n) for n in (12, 3, 7, 14, 1)]


@torch.no_grad()
def own_logprobs(model: Any, prompt: tuple[int, ...], completion: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probabilities of a completion by the model's own forward pass, alone in its row, [T]."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits
    chosen = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return chosen.gather(1, torch.tensor(completion)[:, None])[:, 0]


def remedied(settings: PolicyConfig, error: UserError) -> PolicyConfig | None:
    """Return settings with what the remedy says, its first alternative; None if it says no setting."""
    first = re.split(r",? or ", str(error.remedy or ""))[0]
    found = dict(re.findall(r"\b(?:model\.policy\.)?(pack|share_prompts|attention|compile): (\w+)", first))
    values: dict[str, Any] = {key: {"true": True, "false": False}.get(value, value) for key, value in found.items()}
    return replace(settings, **values) if values else None


def tried(settings: PolicyConfig, act: Callable[[PolicyConfig], float]) -> str:
    """Act with the settings, follow remedies, and say what became of it."""
    refused = False
    for _ in range(4):
        try:
            gap = act(settings)
        except UserError as error:
            following = remedied(settings, error)
            if following is None or following == settings:
                return "no setting"
            settings, refused = following, True
            continue
        if not gap <= EXACT:
            return f"wrong ({gap:.2g})"
        return "refused" if refused else "exact"
    return "wrong (remedies go round)"


def made(settings: PolicyConfig) -> Policy:
    policy = Policy(load_model(resolve_backend(settings)))
    policy.verify_against_model_forward(Layout(settings.pack, settings.share_prompts))
    return policy


def learner(settings: PolicyConfig) -> float:
    """Return the largest gap of the learner's log-probabilities."""
    policy = made(settings)
    layout = Layout(settings.pack, settings.share_prompts)
    with torch.no_grad():
        found = policy(layout.build(PROMPTS, COMPLETIONS, width=14), entropy="none").logprobs
    # A pristine copy: not the object that the policy has switched and hooked.
    own = load_model(replace(resolve_backend(settings), lora=None)) if settings.lora is None else None
    model = (own if own is not None else policy.without_adapters()).eval()
    return max(
        float((found[i, : len(c)] - own_logprobs(model, p, c)).abs().max())
        for i, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
    )


def adapters(settings: PolicyConfig) -> float:
    lora = replace(settings, lora=LoraConfig(rank=2, alpha=4.0))
    policy = made(lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_B" in name:
                weight.normal_(std=0.1)
    layout = Layout(settings.pack, settings.share_prompts)
    with torch.no_grad():
        found = policy(layout.build(PROMPTS, COMPLETIONS, width=14), entropy="none").logprobs
    merged = load_model(resolve_backend(settings))
    TransformersEngine(merged, [2], own_weights=True)  # its weights are those that a sync would bring
    names = dict(merged.named_parameters())
    with torch.no_grad():
        for name, own in policy.named_weights():
            names[name].copy_(own)
    return max(
        float((found[i, : len(c)] - own_logprobs(merged.eval(), p, c)).abs().max())
        for i, (p, c) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
    )


@torch.no_grad()
def critic(settings: PolicyConfig) -> float:
    value = Critic(backbone(load_model(resolve_backend(settings))), CriticConfig())
    layout = Layout(settings.pack, settings.share_prompts)
    value.verify_against_model_forward(layout)
    batch = layout.build(PROMPTS, COMPLETIONS, width=14)
    states = hidden_states(value.base, batch)[0].flatten(0, 1)[batch.source]
    most = 0.0
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = torch.tensor([[*prompt, *completion]])
        own = value.base(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        most = max(most, float((states[batch.row == i] - own).abs().max() / own.abs().max()))
    return most


def experts(settings: PolicyConfig) -> str:
    policy = made(settings)
    if not policy.routes:
        return "–"
    try:
        policy.verify_against_model_forward(Layout(settings.pack, settings.share_prompts), replay=True)
    except UserError as error:
        # The remedy, routing_replay: none, is what all other columns run with.
        return "refused" if "routing_replay: none" in str(error.remedy) else "wrong (remedy)"
    return "exact"


def gradient(settings: PolicyConfig) -> float:
    policy, found = made(settings), []
    for layout in (Layout(False, False), Layout(settings.pack, settings.share_prompts)):
        policy.zero_grad()
        policy(layout.build(PROMPTS, COMPLETIONS, width=14)).logprobs.sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    return float((found[0] - found[1]).norm() / found[0].norm())


def engine(settings: PolicyConfig) -> float:
    """Sample under weights that were changed after the engine was made, and ask the learner's model of them."""
    model = load_model(resolve_backend(settings)).eval()
    policy = Policy(model)
    sampler = TransformersEngine(model, [2], own_weights=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    sampler.sync(policy.named_weights(), 1)
    requests = [Request(i, p, (10 * i, 10 * i + 1)) for i, p in enumerate({*PROMPTS, _draw(20, 5), _draw(13, 6)})]
    prompts = {r.index: r.token_ids for r in requests}
    most = 0.0
    for c in sampler.generate(requests, Sampling(max_new_tokens=12)):
        gap = (torch.tensor(c.logprobs) - own_logprobs(model, prompts[c.request], c.token_ids)).abs().max()
        most = max(most, float(gap))
    return most


def cells(family: str, chosen: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """Return the cells of a family's row."""
    out: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        save(family, Path(name))
        plain = PolicyConfig(path=name, pack=False, share_prompts=False)
        packed = replace(plain, pack=True)
        whole = replace(packed, share_prompts=True)
        ways: dict[str, Callable[[], str]] = {
            "padded": lambda: tried(plain, learner),
            "packed": lambda: tried(packed, learner),
            "shared": lambda: tried(whole, learner),
            "eager": lambda: tried(replace(whole, attention="eager"), learner),
            "sdpa": lambda: tried(replace(whole, attention="sdpa"), learner),
            "varlen": lambda: "no GPU" if not torch.cuda.is_available() else "not run",
            "LoRA": lambda: tried(whole, adapters),
            "critic": lambda: tried(whole, critic),
            "experts": lambda: _followed(whole, experts),
            "gradient": lambda: tried(whole, gradient),
            "engine": lambda: tried(plain, engine),
        }
        for column in chosen:
            try:
                out[column] = ways[column]()
            except Exception as error:
                traceback.print_exc()
                out[column] = f"wrong ({type(error).__name__})"
    return out


def _followed(settings: PolicyConfig, act: Callable[[PolicyConfig], str]) -> str:
    for _ in range(3):
        try:
            return act(settings)
        except UserError as error:
            following = remedied(settings, error)
            if following is None:
                return "no setting"
            settings = following
    return "wrong (remedies go round)"


def _into(family: str, path: str, chosen: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    Path(path).write_text(json.dumps(cells(family, chosen)), encoding="utf-8")


def row(family: str, chosen: tuple[str, ...] = COLUMNS) -> dict[str, str]:
    """Return a family's cells, from a process of its own that is ended after a time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cells.json"
        process = multiprocessing.get_context("fork").Process(target=_into, args=(family, str(path), chosen))
        process.start()
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
        if not path.exists():
            return dict.fromkeys(chosen, f"wrong (exit {process.exitcode})")
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return found


def table(rows: dict[str, dict[str, str]]) -> str:
    """Return the table and its counts, as Markdown."""
    lines = ["| family | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [f"| {family} | " + " | ".join(found[c] for c in COLUMNS) + " |" for family, found in rows.items()]
    counts = Counter(cell.partition(" (")[0] for found in rows.values() for cell in found.values())
    total = ", ".join(f"{counts[word]} {word}" for word in ("exact", "refused", "no setting", "wrong"))
    return "\n".join([*lines, "", f"{len(rows)} families: {total}."])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family", nargs="*", help="all if left out")
    parser.add_argument("--workers", type=int, default=2, help="families at once")
    parser.add_argument("--write", action="store_true", help="put the rows of the named families into docs/models.md")
    arguments = parser.parse_args()
    families = arguments.family or sorted(FAMILIES)
    # Imported before processes are forked, so that each does not pay for it.
    import peft  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    with ThreadPoolExecutor(arguments.workers) as pool:
        rows = dict(zip(families, pool.map(row, families), strict=True))
    text = table(rows)
    print(text)
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    if arguments.family and arguments.write:
        # Rows of families that were not asked for stay as they were measured.
        for line in rest.partition(END)[0].splitlines():
            name, *old = line.strip("| ").split(" | ")
            if name in FAMILIES and name not in rows and len(old) == len(COLUMNS):
                rows[name] = dict(zip(COLUMNS, old, strict=True))
        text = table(dict(sorted(rows.items())))
    if not arguments.family or arguments.write:
        after = rest.partition(END)[2]
        TARGET.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return min(99, sum(cell.startswith("wrong") for found in rows.values() for cell in found.values()))


if __name__ == "__main__":
    sys.exit(main())
