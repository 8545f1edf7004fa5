"""The malformed inputs of ``chaos.py inputs``: by kind, half of them derived from the types that the parser reads."""

# ruff: noqa: E501 - tables of short inputs, several to a line

from __future__ import annotations

import dataclasses
import gzip
import importlib
import inspect
import json
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_grpo.datamodule import RolloutDataModule
from lit_grpo.module import LitGRPO
from lit_grpo.objectives import registry
from lit_grpo.utils.bounds import Bound

BASE = """\
seed_everything: 1
model:
  policy: {tiny: {alphabet: '0123456789+= abcdefghijklmnopqrstuvwxyz?', width: 16, heads: 2, layers: 1, max_position: 48}}
  optimizer: {lr: 1.0e-3}
data:
  prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1}}
  rewards: [{class_path: lit_grpo.rewards.AdditionReward}]
  group_size: 2
  prompts_per_rollout: 2
  rollouts: 1
  sampling: {max_new_tokens: 4}
trainer: {accelerator: cpu, logger: false, enable_checkpointing: false, enable_progress_bar: false}
"""

Setup = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """One input, and whether it is malformed.

    Attributes:
        group: kind of the input.
        name: what is wrong with it.
        argv: the whole command line; {folder} stands for the folder of the case.
        files: content by name.
        accept: whether it is right, and must run.
        mentions: text that the screen must hold, so that it is refused for what is wrong with it.
        setup: what else has to be in the folder.
        environment: environment variables.
    """

    group: str
    name: str
    argv: tuple[str, ...]
    files: dict[str, str | bytes] = field(default_factory=dict)
    accept: bool = False
    mentions: str = ""
    setup: Setup | None = None
    environment: dict[str, str] = field(default_factory=dict)


def fit(group: str, name: str, layer: str | bytes | None = None, *argv: str, **more: Any) -> Case:
    """A run of the base configuration, with one more layer or options."""
    files = {"base.yaml": BASE, **more.pop("files", {})}
    words = ["fit", "--config", "base.yaml"]
    if layer is not None:
        files["case.yaml"] = layer
        words += ["--config", "case.yaml"]
    return Case(group, name, (*words, *argv), files, **more)


# Derived from types.


def _members(hint: Any) -> list[Any]:
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _members(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return [one for member in typing.get_args(hint) for one in _members(member)]
    return [hint]


def _leaves() -> Iterator[tuple[str, list[Any], Bound | None]]:
    """Yield (dotted key, members of its type, bound) of every key whose type is written in the program."""

    def walk(hint: Any, key: str, depth: int) -> Iterator[tuple[str, list[Any], Bound | None]]:
        members = _members(hint)
        bound = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Bound)), None)
        inner = next((m for m in members if dataclasses.is_dataclass(m)), None)
        if inner is None:
            yield key, members, bound
        elif depth < 4:
            for name, below in typing.get_type_hints(inner, include_extras=True).items():
                if name in {f.name for f in dataclasses.fields(inner)}:
                    yield from walk(below, f"{key}.{name}", depth + 1)

    for cls, top in ((LitGRPO, "model"), (RolloutDataModule, "data")):
        for name, hint in typing.get_type_hints(cls.__init__, include_extras=True).items():
            if name not in ("return", "objective"):
                yield from walk(hint, f"{top}.{name}", 0)


def _layer(key: str, value: str) -> str:
    lines = [f"{'  ' * depth}{name}:" for depth, name in enumerate(key.split("."))]
    return "\n".join(lines) + f" {value}\n"


def _outside(bound: Bound) -> str | None:
    low = bound.least if bound.least is not None else bound.above
    if low is not None:
        return str(low - 1 if bound.least is not None else low)
    high = bound.most if bound.most is not None else bound.below
    return None if high is None else str(high + 1)


def numbers() -> Iterator[Case]:
    """Numbers out of their range, null, not finite, or of another type, for every key."""
    for key, members, bound in _leaves():
        kinds = {int, float} & set(members)
        if not kinds:
            continue
        last = key.rpartition(".")[2]
        values = {"text": "abc", "list": "[1, 2]"}
        if types.NoneType not in members:
            values["null"] = "null"
        if bound is not None and (out := _outside(bound)) is not None:
            values["out of range"] = out if float in kinds else str(int(float(out)))
        values |= {"nan": ".nan", "inf": ".inf"} if float in kinds else {"fraction": "1.5"}
        # A part that may be left out is refused as a whole where it does not fit the run; then its key is named.
        mention = last if key.count(".") < 3 else ""
        for what, value in values.items():
            if not (float in kinds and what == "inf" and bound is not None and bound.infinite):
                yield fit("numbers", f"{key}: {what}", _layer(key, value), mentions=mention)


def words() -> Iterator[Case]:
    """Words that are none of the choices, nulls and wrong types where text or a choice belongs, for every key."""
    for key, members, _ in _leaves():
        literals = [one for one in members if typing.get_origin(one) is typing.Literal]
        # A part of its own that may be left out: some word in it is refused with the part, or there is nothing to say.
        if literals and not {int, float} & set(members):
            yield fit("words", f"{key}: no such word", _layer(key, "no_such_word"))
            if types.NoneType not in members:
                yield fit("words", f"{key}: null", _layer(key, "null"), mentions=key.rpartition(".")[2])
        elif members == [bool]:
            yield fit("words", f"{key}: no truth value", _layer(key, "perhaps"))
            yield fit("words", f"{key}: null", _layer(key, "null"))
        elif str in members and not any(typing.get_origin(one) for one in members):
            yield fit("words", f"{key}: a list", _layer(key, "[a]"))


def objectives() -> Iterator[Case]:
    """Numbers of an objective out of their range, with the part that takes them."""
    for heading, known in [*((h, list(k.values())) for h, (_, k) in registry.CHOICES.items())]:
        for part in known:
            for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
                bound = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Bound)), None)
                if bound is None or not registry.has_setting(part, name) or (out := _outside(bound)) is None:
                    continue
                value = str(int(float(out))) if int in _members(hint) else out
                layer = f"model: {{objective: {{{heading}: {part.kind}, {name}: {value}}}}}\n"
                yield fit("objective", f"{part.kind}: {name} {value}", layer)
    for part in registry.ALWAYS.values():
        for name, hint in typing.get_type_hints(type(part), include_extras=True).items():
            if {int, float} & set(_members(hint)) and registry.has_setting(part, name):
                yield fit("objective", f"{name}: nan", f"model: {{objective: {{{name}: .nan}}}}\n")


# Written by hand.


def yaml_files() -> Iterator[Case]:
    """Files that are no YAML, no configuration, or far too much of it."""
    good = {"BOM": "\ufeff" + BASE, "CRLF": BASE.replace("\n", "\r\n"), "anchor": BASE + "checkpoint: &a {}\n"}
    for name, whole in good.items():
        yield Case("yaml", name, ("fit", "--config", "c.yaml"), {"c.yaml": whole.encode()}, accept=True)
    bombs = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
    )
    bad: dict[str, str | bytes] = {
        "empty": "", "only comments": "# nothing\n", "a list": "- a\n- b\n", "a word": "word", "a number": "7", "null": "null",
        "tab": "model:\n\tpolicy: 1\n", "open bracket": "model: [1, 2\n", "open quote": "model: 'x\n", "open brace": "model: {a: 1\n",
        "UTF-16": BASE.encode("utf-16"), "latin-1": "model: \xe4\xf6".encode("latin-1"), "binary": bytes(range(256)),
        "NUL": "model: a\0b", "control": "model: a\x07b", "double key": BASE + "trainer: {}\n", "double nested": "model: {a: 1, a: 2}",
        "undefined alias": "model: *x", "recursive alias": "model: &a {b: *a}", "billion laughs": bombs,
        "billion laughs in data": f"data: {{prompts: {{init_args: &z {{x: 1}}}}}}\n{bombs}", "python object": "model: !!python/object:os.system {}",
        "python name": "model: !!python/name:os.system", "python apply": "model: !!python/object/apply:os.system ['true']",
        "unknown tag": "model: !x 1", "two documents": "model: {}\n---\nmodel: {}\n", "deep list": "model: " + "[" * 3000 + "]" * 3000,
        "deep mapping": "model: " + "{a: " * 3000 + "1" + "}" * 3000, "deep 60": "model: " + "[" * 60 + "]" * 60,
        "10 MB": "model: " + "x" * 10_000_000, "int key": "1: 2", "null key": "null: 2", "list key": "[a]: 2", "bool key": "true: 2",
        "unknown key": "modle: {}", "unknown nested": "model: {polciy: {}}", "5000 digits": f"data: {{rollouts: {'9' * 5000}}}",
        "350 digits": f"data: {{rollouts: {'9' * 350}}}", "sexagesimal": "data: {rollouts: 1:30}", "date": "data: {rollouts: 2020-01-01}",
        "merge of a word": "model: {<<: word}", "section null": "model: null", "section a list": "data: [1]", "section text": "trainer: fast",
        "unclosed tag": "model: !<", "bad escape": 'model: "\\q"', "percent": "%YAML 9.9\nmodel: {}", "at sign": "model: @x", "backtick": "model: `x`",
        "a JSON with a comma": '{"model": {},}x', "HTML": "<html><body>404</body></html>", "a tab in a flow": "model: {\t\ta: }1",
    }  # fmt: skip
    for name, text in bad.items():
        yield (
            fit("yaml", name, text)
            if name not in ("empty", "only comments")
            else Case("yaml", name, ("fit", "--config", "c.yaml"), {"c.yaml": text})
        )
    yield fit("yaml", "no such file", None, "--config", "nothing.yaml", mentions="nothing.yaml")
    yield fit("yaml", "a folder", None, "--config", ".")
    yield fit("yaml", "a device", None, "--config", "/dev/null/x")


def command_lines() -> Iterator[Case]:
    """Command lines that say nothing, or nothing that there is."""
    for words in (
        ["fti"], ["--config", "base.yaml"], ["fit", "--config"], ["fit", "-confg", "base.yaml"], ["fit", "base.yaml"], ["fit", "--"],
        ["check"], ["filter"], ["score"], ["report"], ["export"], ["report", "nothing"], ["report", "runs/none"],
        ["export", "--checkpoint", "nothing.ckpt", "--output", "o"], ["export", "--checkpoint", "base.yaml", "--output", "o"],
        ["export", "--checkpoint", ".", "--output", "o"], ["score", "--input", "nothing.jsonl"], ["score", "--input", "."],
        ["score", "--input", "base.yaml"], ["filter", "--config", "base.yaml", "--output"], ["check", "--config", "nothing.yaml"],
        ["validate", "--config", "base.yaml"], ["test", "--config", "base.yaml"], ["score", "--inptu", "x"], ["report", "--x"],
    ):  # fmt: skip
        yield Case("command line", " ".join(words), tuple(words), {"base.yaml": BASE})
    options = {
        "no value": ["--data.rollouts"], "unknown": ["--data.rolouts", "3"], "one dash": ["-data.rollouts", "3"], "a word": ["word"],
        "text for a number": ["--data.rollouts", "many"], "fraction": ["--data.rollouts", "1.5"], "empty": ["--data.rollouts", ""],
        "below a leaf": ["--data.rollouts.x", "3"], "a comment": ["--data.rollouts", "# 3"], "broken YAML": ["--data.engine", "{a"],
        "deep": ["--model.policy.model_args", "[" * 2000], "null": ["--data.rollouts", "null"], "negative": ["--data.rollouts=-1"],
        "digits": ["--data.rollouts", "9" * 6000], "recipe null": ["--model.objective.recipe", "null"], "policy null": ["--model.policy", "null"],
        "objective a word": ["--model.objective", "word"], "class of nothing": ["--data.prompts", "no.such.Class"], "comment for a group": ["--model.policy", "# x"],
        "a function for a class": ["--data.prompts", "os.path.join"], "another kind": ["--data.prompts", "lit_grpo.rewards.MathReward"],
        "checkpoint missing": ["--ckpt_path", "none.ckpt"], "checkpoint last": ["--ckpt_path", "last"], "checkpoint null byte": ["--seed_everything", "x"],
        "seed negative": ["--seed_everything", "-1"], "seed huge": ["--seed_everything", "99999999999999"], "print what": ["--print_config=all"],
    }  # fmt: skip
    for name, argv in options.items():
        yield fit("command line", name, None, *argv)
    for name, value in {"LIT_GRPO_FIT__DATA__ROLOUTS": "3", "LIT_GRPO_FIT__DATA__ROLLOUTS": "x", "LIT_GRPO_LOG": "loud",
                        "LIT_GRPO_FIT__MODEL": "{a", "LIT_GRPO_FIT__DATA__GROUP_SIZE": "0"}.items():  # fmt: skip
        more = [] if "ROLLOUTS" not in name and "GROUP" not in name else ["--data.prompts_per_rollout", "2"]
        base = BASE.replace("  rollouts: 1\n", "").replace("  group_size: 2\n", "")
        yield Case(
            "command line",
            f"{name}={value}",
            ("fit", "--config", "base.yaml", *more),
            {"base.yaml": base},
            environment={name: value},
        )


def trainers() -> Iterator[Case]:
    """Settings of the Trainer, the logger and the checkpoints that cannot be."""
    for setting in (
        "devices: 0", "devices: -3", "devices: x", "accelerator: gpu", "accelerator: abacus", "precision: 7", "strategy: unknown", "max_epochs: -5",
        "val_check_interval: 0", "check_val_every_n_epoch: 0", "log_every_n_steps: 0", "num_nodes: 0", "max_steps: 5", "gradient_clip_val: 1.0",
        "accumulate_grad_batches: 2", "max_time: soon", "limit_train_batches: -1", "limit_val_batches: 1.5", "callbacks: x", "callbacks: [x.Y]",
        "callbacks: [{class_path: lit_grpo.rewards.MathReward}]", "callbacks: [{class_path: lit_grpo.callbacks.NoMonitor}]", "logger: no.Logger",
        "profiler: nothing", "benchmark: maybe", "default_root_dir: afile/x", "min_epochs: -1", "detect_anomaly: 7", "plugins: nothing",
        "reload_dataloaders_every_n_epochs: 1", "sync_batchnorm: x", "inference_mode: null x", "overfit_batches: -2", "fast_dev_run: -1",
    ):  # fmt: skip
        files: dict[str, str] = {"afile": "x"}
        yield fit("trainer", setting, f"trainer: {{{setting}}}\n", files=files)
    for arguments in (
        "run_name: ../out", "run_name: ../../x", "run_name: /tmp/x", "run_name: a/../../b", "run_name: '..'", "run_name: '.'", 'run_name: "a\\0b"',
        'run_name: "a\\nb"', f"run_name: {'x' * 300}", "run_name: [a]", "root: afile", "root: afile/below", "root: null", "root: /proc/none",
        "tracking_uri: 'file:runs'", "tracking_uri: somewhere", "patience: .nan", "patience: null", "patience: soon", "tags: word", "nothing: 1",
        "experiment: null", "run_dir: afile", "run_dir: /proc/none/x",
    ):  # fmt: skip
        layer = f"trainer: {{logger: {{class_path: lit_grpo.tracking.RunLogger, init_args: {{{arguments}}}}}}}\n"
        yield fit("logger", arguments[:40], layer, files={"afile": "x"})
    for arguments in (
        "every_n_rollouts: 0",
        "every_n_rollouts: null",
        "every_n_rollouts: x",
        "dirpath: afile",
        "dirpath: [a]",
        "nothing: 1",
    ):
        layer = f"checkpoint: {{{arguments}}}\ntrainer: {{enable_checkpointing: true}}\n"
        yield fit("checkpoint", arguments, layer, files={"afile": "x"})
    layer = "trainer: {logger: {class_path: lit_grpo.tracking.RunLogger, init_args: {run_name: sweep/a, tracking_uri: 'sqlite:///m.db'}}}\n"
    yield fit("logger", "a name in a folder", layer, accept=True)
    yield fit("logger", "read-only", layer.replace("run_name", "root: ro, run_name"), setup=_read_only)


def _read_only(folder: Path) -> None:
    # The kernel's own: root may write into a folder whatever its mode.
    (folder / "ro").symlink_to("/proc/self/fd")


def contradictions() -> Iterator[Case]:
    """Settings that are right each for itself, and not together."""
    for layer in (
        "model: {policy: {path: x}}", "model: {policy: {tiny: null}}", "model: {policy: {tiny: {width: 15}}}", "model: {policy: {tiny: {alphabet: ''}}}",
        "model: {policy: {tiny: {alphabet: 'aa'}}}", "model: {policy: {tiny: {alphabet: '01'}}}", "model: {policy: {tiny: {width: 100000000}}}",
        "model: {policy: {tiny: {max_position: 2}}}", "model: {policy: {dtype: float16}}", "model: {policy: {lora: {target_modules: [nothing]}}}",
        "model: {policy: {quantization: {}}}", "model: {critic: {}}", "model: {objective: {recipe: ppo, advantage: group_std}}",
        "model: {objective: {gae_lambda: 0.5}}", "model: {objective: {clip_hgh: 1}}", "model: {objective: {recipe: gpro}}", "model: {objective: {recipe: null}}",
        "model: {objective: null}", "model: {optimizer: null}", "model: {guards: null}", "model: {optimizer: {type: torch.optim.Adagrad2}}",
        "model: {optimizer: {type: os.path.join}}", "model: {optimizer: {type: Adam}}", "model: {optimizer: {args: {x: 1}}}", "model: {optimizer: {args: {lr: 1}}}",
        "model: {optimizer: {betas: [0.9]}}", "model: {optimizer: {betas: [0.9, 0.9, 0.9]}}", "model: {optimizer: {betas: [0.9, 1.0]}}", "model: {optimizer: {betas: [.nan, 0.9]}}",
        "model: {optimizer: {warmup_steps: 1, warmup_ratio: 0.1}}", "model: {optimizer: {scheduler: os.path}}", "model: {minibatch_prompts: 3}", "model: {updates_per_rollout: 3, minibatch_prompts: 1}",
        "model: {routing_replay: old}", "model: {max_staleness: 1, objective: {recipe: sft}}", "data: {rewards: []}", "data: {rewards: null}", "data: {rewards: {}}", "data: {rewards: [null]}",
        "data: {rewards: [{class_path: lit_grpo.rewards.AdditionReward}, {class_path: lit_grpo.rewards.AdditionReward}]}", "data: {prompts: null}", "data: {sampling: {temperature: 0}}",
        "data: {sampling: {top_p: 0.5}}", "data: {sampling: {top_k: 3}}", "data: {sampling: {max_new_tokens: 4000}}", "data: {sampling: {stop_token_ids: [99999]}}", "data: {sampling: {stop_token_ids: [-1]}}",
        "data: {sampling: {stop: word}}", "data: {sampling: {stop: ['']}}", "data: {group_size: 1}", "data: {engine: {name: vlm}}", "data: {engine: {custom_engine: no.Engine}}", "data: {engine: {init_args: {a: 1}}}",
        "data: {engine: {custom_engine: os.path}}", "data: {format: {chat_template: '{% if %}'}}", "data: {format: {chat_template: no_such}}", "data: {format: {chat_template: chat}}", "data: {format: {question_format: 'x'}}",
        "data: {format: {max_prompt_tokens: 1}}", "data: {format: {chat_template_kwargs: {tokenize: 1}}}", "data: {val: {nothing: {}}}", "data: {val: {'..': {path: d.jsonl}}}", "data: {val: {a: {path: none.jsonl}}}",
        "data: {val: {a: {path: base.yaml}}}", "data: {val: {a: {samples: 0}}}", "data: {val: {a: null}}", "data: {val: [a]}", "data: {curriculum: {above: 0.9, below: 0.1}}", "data: {clean: {decontaminate: [x]}}",
        "data: {clean: {dropped_file: /proc/none/x, deduplicate: true}}", "data: {demonstrations: {template: x}}", "data: {eval_sampling: {top_p: 2}}", "data: {on_reward_error: panic}", "data: {prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 0}}}",
        "data: {prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: null}}}", "data: {prompts: {class_path: lit_grpo.data.AdditionPrompts, init_args: {digits: 1, nothing: 1}}}", "data: {prompts: {class_path: lit_grpo.data.JsonlPrompts}}",
        "data: {prompts: {init_args: {digits: 50}}}", "model: {objective: {custom_objective: no.such}}", "model: {objective: {custom_advantage: os.getcwd2}}", "model: {objective: {custom_trust_region: {class_path: os}}}", "model: {objective: {advantage: '# off'}}",
    ):  # fmt: skip
        yield fit("contradiction", layer, layer + "\n")


def _jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def data_files() -> Iterator[Case]:
    """Files of questions that are torn, empty, of another kind, or not what the reward needs."""
    row = {"prompt": "1+1=", "answer": "2"}
    good = _jsonl(row, {"prompt": "1+2=", "answer": 3})
    source = "data: {{prompts: {{class_path: lit_grpo.data.{kind}, init_args: {{path: {path}{more}}}}}, rewards: [{{class_path: lit_grpo.rewards.{reward}}}]}}\n"

    def case(
        name: str,
        content: str | bytes | None,
        reward: str = "ExactMatch",
        kind: str = "JsonlPrompts",
        path: str = "d.jsonl",
        more: str = "",
        **rest: Any,
    ) -> Case:
        files = {} if content is None else {path: content}
        return fit("data", name, source.format(kind=kind, path=path, more=more, reward=reward), files=files, **rest)

    yield case("good", good, accept=True)
    yield case(
        "a pattern of #",
        _jsonl({"prompt": "1+1=", "answer": "so #### 2"}),
        more=", answer_pattern: '####\\s*(.+)'",
        accept=True,
    )
    bad: dict[str, str | bytes | None] = {
        "missing": None, "empty": "", "blank": "\n \n", "bad JSON": good + "{x\n", "torn": good[:-9], "a number": "1\n", "null": "null\n", "lists": "[[1]]\n", "text": '"a"\n', "pretty": json.dumps(row, indent=1),
        "no prompt": _jsonl({"answer": "2"}), "prompt null": _jsonl(row, {"prompt": None, "answer": "2"}), "prompt number": _jsonl({"prompt": 1, "answer": "2"}), "prompt empty": _jsonl({"prompt": " ", "answer": "2"}),
        "prompt list": _jsonl({"prompt": [1], "answer": "2"}), "chat of nothing": _jsonl({"prompt": [], "answer": "2"}), "chat without role": _jsonl({"prompt": [{"content": "x"}], "answer": "2"}),
        "answer null": _jsonl({"prompt": "1+1=", "answer": None}), "answer list": _jsonl({"prompt": "1+1=", "answer": [1, 2]}), "answer NaN": '{"prompt": "1+1=", "answer": NaN}\n', "answer empty": _jsonl({"prompt": "1+1=", "answer": ""}),
        "answer Infinity": '{"prompt": "1+1=", "answer": Infinity}\n', "answer true": _jsonl({"prompt": "1+1=", "answer": True}), "second row without": _jsonl(row, {"prompt": "1+1="}),
        "double ids": _jsonl({"id": "a", **row}, {"id": "a", **row}), "id null": _jsonl({"id": None, **row}), "id mapping": _jsonl({"id": {}, **row}), "double JSON keys": '{"prompt": "1+1=", "answer": "2", "answer": "3"}\n',
        "NUL": good.encode() + b"\0\n", "not UTF-8": good.encode() + b"\xff\xfe\n", "UTF-16": good.encode("utf-16"), "half a character": '{"prompt": "\\ud800", "answer": "2"}\n', "deep": '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}\n",
        "huge number": '{"prompt": "1+1=", "answer": 1' + "0" * 9000 + "}\n", "unknown letters": _jsonl({"prompt": "\u00e4", "answer": "2"}), "longer than the model": _jsonl({"prompt": "1" * 3000, "answer": "2"}),
        "20 MB in a line": _jsonl({"prompt": "1" * 20_000_000, "answer": "2"}), "HTML": "<html></html>\n", "pickle": b"\x80\x04\x95\x05", "gzip header": b"\x1f\x8b\x08\x00", "torn gzip": gzip.compress(good.encode())[:-6],
    }  # fmt: skip
    for name, content in bad.items():
        yield case(name, content)
    for name, more in {"limit 0": ", limit: 0", "limit null text": ", limit: x", "where none": ", where: {answer: '9'}", "where missing": ", where: {x: 1}", "pattern broken": ", answer_pattern: '('", "pattern without group": ", answer_pattern: 'x'",
                       "pattern of nothing": ", answer_pattern: '####\\s*(.+)'", "no such column": ", question_column: q", "no such answer": ", answer_column: q", "no such id": ", id_column: q", "layout": ", layout: paper", "path null": ", name: [x]"}.items():  # fmt: skip
        yield case(name, good, more=more)
    for reward, name, rows in (
        ("NumericReward", "gold is no number", [{"prompt": "1+1=", "answer": "two"}]), ("ChoiceReward", "gold is no letter", [{"prompt": "1+1=", "answer": "the first"}]), ("CountdownReward", "no numbers", [row]),
        ("CountdownReward", "numbers are text", [{**row, "nums": ["1", "2"]}]), ("CountdownReward", "numbers are empty", [{**row, "nums": []}]), ("CountdownReward", "target is text", [{"prompt": "1+1=", "answer": "x", "nums": [1, 2]}]),
        ("CodeReward", "no tests", [row]), ("CodeReward", "tests are numbers", [{**row, "tests": [1]}]), ("CodeReward", "tests do not compile", [{**row, "tests": ["assert ("]}]), ("CodeReward", "both", [{**row, "tests": ["assert 1"], "cases": [{"input": "", "output": ""}]}]),
        ("CodeReward", "cases without output", [{**row, "cases": [{"input": "1"}]}]), ("CodeReward", "tests a mapping", [{**row, "tests": {"a": 1}}]), ("MathReward", "no answer", [{"prompt": "1+1="}]),
    ):  # fmt: skip
        yield case(
            f"{reward}: {name}",
            _jsonl({"prompt": "1+1=", "answer": "2", "nums": [1, 1], "tests": ["assert 1"]}, *rows)
            if reward != "CodeReward"
            else _jsonl(*rows),
            reward=reward,
        )
    for name, content in {
        "empty": "",
        "no header": "1+1=,2\n",
        "ragged": "prompt,answer\n1+1=,2\n1+2=\n",
        "open quote": 'prompt,answer\n"1+1=,2\n',
        "NUL": "prompt,answer\n1+\0=,2\n",
        "double column": "prompt,prompt\na,b\n",
    }.items():
        yield case(f"csv: {name}", content, kind="CsvPrompts", path="d.csv")
    yield case("csv: long delimiter", "prompt,answer\n1,2\n", kind="CsvPrompts", path="d.csv", more=", delimiter: ';;'")
    for name, parquet in {"text": b"no parquet", "empty": b"", "torn": b"PAR1\x15\x04"}.items():
        yield case(f"parquet: {name}", parquet, kind="ParquetPrompts", path="d.parquet")
    yield fit(
        "data",
        "no such data set",
        "data: {prompts: {class_path: lit_grpo.data.HubPrompts, init_args: {dataset: nobody/none}}}\n",
    )


def classes() -> Iterator[Case]:
    """Arguments of every class that a configuration names: numbers that are null, NaN, text or lists."""
    places = {
        "lit_grpo.rewards": "data: {{rewards: [{spec}]}}\n",
        "lit_grpo.data": "data: {{prompts: {spec}}}\n",
        "lit_grpo.callbacks": "trainer: {{callbacks: [{spec}]}}\n",
        "lit_grpo.tracking": "trainer: {{logger: {spec}}}\n",
    }
    for module, place in places.items():
        for name in importlib.import_module(module).__all__:
            cls = getattr(importlib.import_module(module), name)
            if not inspect.isclass(cls) or inspect.isabstract(cls) or dataclasses.is_dataclass(cls):
                continue
            hints = typing.get_type_hints(vars(cls).get("__init__", lambda: None), include_extras=True)
            for argument, hint in hints.items():
                members = _members(hint)
                if not {int, float} & set(members) or argument == "return":
                    continue
                values = {"text": "abc", "list": "[a]", "nan": ".nan"}
                if types.NoneType not in members:
                    values["null"] = "null"
                for what, value in values.items():
                    spec = f"{{class_path: {module}.{name}, init_args: {{{argument}: {value}}}}}"
                    yield fit("class", f"{name}.{argument}: {what}", place.format(spec=spec))
