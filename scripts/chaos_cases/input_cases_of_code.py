"""Malformed inputs that are code, verdicts to give, or models: rewards, files to score, model folders."""

# ruff: noqa: E501 - tables of short inputs, several to a line

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.chaos_cases.input_cases import BASE, Case, fit

_ALPHABET = "0123456789+= abcdefghijklmnopqrstuvwxyz?"


def rewards() -> Iterator[Case]:
    """Rewards that cannot be imported, made, or called."""
    layer = "data: {{rewards: [{{class_path: lit_grpo.rewards.FunctionReward, init_args: {{{arguments}}}}}]}}\n"
    for name, (arguments, module) in {
        "no module": ("function: nothing.f", ""),
        "no function": ("function: mymod.g", "def f(text): return 0.0\n"),
        "no dot": ("function: f", ""),
        "a class": ("function: mymod.F", "class F: pass\n"),
        "a number": ("function: mymod.f", "f = 3\n"),
        "syntax error": ("function: mymod.f", "def f(text:\n"),
        "tabs and spaces": ("function: mymod.f", "def f(text):\n\tif 1:\n        return 0.0\n"),
        "raises at import": ("function: mymod.f", "raise RuntimeError('at import')\n"),
        "assertion at import": ("function: mymod.f", "assert False\n"),
        "import of nothing": ("function: mymod.f", "import no_such_module\ndef f(text): return 0.0\n"),
        "name error": ("function: mymod.f", "x = y\ndef f(text): return 0.0\n"),
        "exits 0 at import": ("function: mymod.f", "import sys\nsys.exit()\n"),
        "exits 3 at import": ("function: mymod.f", "raise SystemExit(3)\n"),
        "NUL in the module": ("function: mymod.f", "def f(text): return 0.0\n\0"),
        "deep module": ("function: mymod.f", "x = " + "(" * 3000 + ")" * 3000),
        "unknown parameter": ("function: mymod.f", "def f(txt): return 0.0\n"),
        "no parameter": ("function: mymod.f", "def f(): return 0.0\n"),
        "positional only": ("function: mymod.f", "def f(text, /): return 0.0\n"),
        "mixed": ("function: mymod.f", "def f(text, answers): return 0.0\n"),
        "limit 0": ("function: mymod.f, limit: 0", "def f(text): return 0.0\n"),
        "limit nan": ("function: mymod.f, limit: .nan", "def f(text): return 0.0\n"),
        "weight nan": ("function: mymod.f, weight: .nan", "def f(text): return 0.0\n"),
        "weight inf": ("function: mymod.f, weight: .inf", "def f(text): return 0.0\n"),
        "weight null": ("function: mymod.f, weight: null", "def f(text): return 0.0\n"),
        "function null": ("function: null", ""),
        "function list": ("function: [a]", ""),
        "nothing known": ("function: mymod.f, nothing: 1", "def f(text): return 0.0\n"),
        "concurrency 0": ("function: mymod.f, concurrency: 0", "async def f(text): return 0.0\n"),
        "arguments unknown": ("function: mymod.f, arguments: {x: 1}", "def f(text): return 0.0\n"),
    }.items():  # fmt: skip
        yield fit("reward", f"function: {name}", layer.format(arguments=arguments), files={"mymod.py": module})
    for name, module in {
        "no reward": "class R: pass\n",
        "a function": "def R(): pass\n",
        "raises when made": "from lit_grpo.rewards import Reward\nclass R(Reward):\n    def __init__(self):\n        raise RuntimeError('made')\n",
        "exits when made": "from lit_grpo.rewards import Reward\nclass R(Reward):\n    def __init__(self):\n        raise SystemExit(0)\n",
        "needs an argument": "from lit_grpo.rewards import Reward\nclass R(Reward):\n    def __init__(self, x: int):\n        super().__init__()\n",
        "syntax error": "class R(\n",
        "raises at import": "1 / 0\n",
        "exits at import": "import sys\nsys.exit(0)\n",
        "bad base": "from lit_grpo.rewards import Nothing\nclass R(Nothing): pass\n",
    }.items():  # fmt: skip
        layer_of_class = "data: {rewards: [{class_path: mymod.R}]}\n"
        yield fit("reward", f"class: {name}", layer_of_class, files={"mymod.py": module})
        yield fit(
            "reward", f"callback: {name}", "trainer: {callbacks: [{class_path: mymod.R}]}\n", files={"mymod.py": module}
        )
    for name in (
        "MathReward, init_args: {limit: 0}", "MathReward, init_args: {extract: 7}", "CodeReward, init_args: {memory: -1}", "CodeReward, init_args: {workers: 0}",
        "JudgeReward", "JudgeReward, init_args: {url: x, model: m}", "JudgeReward, init_args: {url: 'http://h', model: m, template: none}", "JudgeReward, init_args: {url: null, model: m}",
        "JudgeReward, init_args: {url: 'http://h', model: m, grades: {RIGHT: x}}", "ExactMatch, init_args: {extract: '('}", "ChoiceReward, init_args: {letters: ''}", "ChoiceReward, init_args: {letters: AAB}",
        "CountdownReward, init_args: {partial: 2}", "NumericReward, init_args: {tolerance: -1}", "NumericReward, init_args: {tolerance: .nan}", "OverlongReward", "NoReward",
        "RewardBySource", "RewardBySource, init_args: {rewards: []}", "Gated", "MathReward, init_args: {nothing: 1}", "MathReward, init_args: [1]", "MathReward, init_args: {weight: x}",
        "MathReward, init_args: {weight: null}", "MathReward, init_args: {name: [a]}", "ReasoningGymReward, init_args: {nothing: 1}", "RepetitionPenalty, init_args: {ngram: 0}", "LengthReward, init_args: {max: 0}",
    ):  # fmt: skip
        yield fit("reward", name, f"data: {{rewards: [{{class_path: lit_grpo.rewards.{name}}}]}}\n")


def scores() -> Iterator[Case]:
    """Files for `lit-grpo score` that cannot be scored, and places that cannot be written."""
    good = json.dumps({"prediction": "\\boxed{4}", "answer": "4"}) + "\n"
    yield Case("score", "good", ("score", "--input", "p.jsonl"), {"p.jsonl": good}, accept=True)
    bad: dict[str, str | bytes] = {
        "bad JSON": good + "{x\n", "list": "[1]\n", "number": "3\n", "no prediction": '{"answer": "4"}\n', "no answer": '{"prediction": "4"}\n', "prediction number": '{"prediction": 4, "answer": "4"}\n',
        "prediction null": '{"prediction": null, "answer": "4"}\n', "answer list": '{"prediction": "4", "answer": [4]}\n', "not UTF-8": good.encode() + b"\xff\n", "torn": good[:-5], "UTF-16": good.encode("utf-16"),
        "deep": '{"prediction": ' + "[" * 5000 + "]" * 5000 + "}\n", "tokens text": '{"prediction": "4", "answer": "4", "tokens": "x"}\n', "tokens negative": '{"prediction": "4", "answer": "4", "tokens": -1}\n',
        "double keys": '{"prediction": "4", "prediction": "5", "answer": "4"}\n', "torn gzip": b"\x1f\x8b\x08\x00",
    }  # fmt: skip
    for name, content in bad.items():
        yield Case("score", name, ("score", "--input", "p.jsonl"), {"p.jsonl": content})
    for name, config in {"empty": "", "list": "- 1\n", "no rewards": "rewards: []\n", "unknown class": "rewards: [{class_path: a.B}]\n", "unknown key": "rewards: [{class_path: lit_grpo.rewards.MathReward}]\nx: 1\n",
                         "null argument": "rewards: [{class_path: lit_grpo.rewards.MathReward, init_args: {weight: null}}]\n", "broken": "rewards: [\n", "deep": "rewards: " + "[" * 3000,
                         "extract": "rewards: [{class_path: lit_grpo.rewards.ExactMatch, init_args: {extract: '('}}]\n", "a word": "rewards: word\n", "null": "rewards: null\n", "bad function": "rewards: [{class_path: lit_grpo.rewards.FunctionReward, init_args: {function: mymod.f}}]\n"}.items():  # fmt: skip
        argv = ("score", "--input", "p.jsonl", "--config", "r.yaml")
        yield Case(
            "score", f"config: {name}", argv, {"p.jsonl": good, "r.yaml": config, "mymod.py": "raise SystemExit(0)\n"}
        )
    for name, output in {
        "a folder": ".",
        "missing folder": "none/o.jsonl",
        "the input": "p.jsonl",
        "the input by another name": "./x/../p.jsonl",
        "a device": "/proc/none",
    }.items():
        yield Case(
            "score",
            f"output: {name}",
            ("score", "--input", "p.jsonl", "--output", output),
            {"p.jsonl": good, "x/y": ""},
        )


def _folder(folder: Path) -> Path:
    """Write a tiny model that is whole."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from lit_grpo.policy.model.char_tokenizer import char_tokenizer

    tokenizer = char_tokenizer(_ALPHABET)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "m")
    tokenizer.save_pretrained(folder / "m")
    return folder / "m"


def _whole(folder: Path) -> None:
    _folder(folder)


def _changed(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    def setup(folder: Path) -> None:
        file = _folder(folder) / name
        content = change(file.read_bytes() if file.exists() else b"")
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)

    return setup


def _config(**changes: Any) -> Callable[[Path], None]:
    return _changed("config.json", lambda old: json.dumps({**json.loads(old), **changes}).encode())


def _pickle(folder: Path) -> None:
    import torch

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(folder / "ran"), "w"))

    model = _folder(folder)
    (model / "model.safetensors").unlink()
    torch.save({"x": Evil()}, model / "pytorch_model.bin")


def _broken_json_header(old: bytes) -> bytes:
    return struct.pack("<Q", 5) + b"{x: 1" + old[13:]


def _nan_weights(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    file = _folder(folder) / "model.safetensors"
    save_file(
        {name: torch.full_like(weight, float("nan")) for name, weight in load_file(file).items()},
        file,
        {"format": "pt"},
    )


def models() -> Iterator[Case]:
    """Model folders that are torn, incomplete, of other shapes, or not there; names of a hub that cannot be asked."""
    layer = "model: {policy: {tiny: null, path: ./m}}\n"
    yield fit("model", "whole", layer, setup=_whole, accept=True)
    weights = "model.safetensors"
    setups: dict[str, Callable[[Path], object]] = {
        "no folder": lambda f: None, "empty folder": lambda f: (f / "m").mkdir(), "a file": lambda f: (f / "m").write_text("x"),
        "no config": _changed("config.json", lambda b: None), "config empty": _changed("config.json", lambda b: b""), "config no JSON": _changed("config.json", lambda b: b[:-9]),
        "config a list": _changed("config.json", lambda b: b"[]"), "config binary": _changed("config.json", lambda b: bytes(range(256))), "no model_type": _config(model_type=None), "unknown model_type": _config(model_type="nothing"),
        "an encoder": _config(model_type="bert", architectures=["BertModel"]), "heads do not divide": _config(num_attention_heads=3), "layers are text": _config(num_hidden_layers="two"), "layers negative": _config(num_hidden_layers=-1, layer_types=[]),
        "hidden size 0": _config(hidden_size=0), "more layers": _config(num_hidden_layers=3, layer_types=["full_attention"] * 3), "wider": _config(hidden_size=32), "larger vocabulary": _config(vocab_size=99), "smaller vocabulary": _config(vocab_size=9),
        "no weights": _changed(weights, lambda b: None), "weights empty": _changed(weights, lambda b: b""), "weights half": _changed(weights, lambda b: b[: len(b) // 2]), "weights a byte short": _changed(weights, lambda b: b[:-1]),
        "weights a byte long": _changed(weights, lambda b: b + b"x"), "weights text": _changed(weights, lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), "weights zeros": _changed(weights, lambda b: b"\0" * len(b)),
        "weights header": _changed(weights, _broken_json_header), "weights NaN": _nan_weights, "pickle": _pickle, "index of nothing": _changed("model.safetensors.index.json", lambda b: b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "index broken": _changed("model.safetensors.index.json", lambda b: b"{"), "no tokenizer": _changed("tokenizer.json", lambda b: None), "tokenizer torn": _changed("tokenizer.json", lambda b: b[: len(b) // 2]),
        "tokenizer config torn": _changed("tokenizer_config.json", lambda b: b[: len(b) // 2]), "generation config torn": _changed("generation_config.json", lambda b: b"{"),
        "template that never ends": _changed("chat_template.jinja", lambda b: b"{% for i in range(999999999) %}{% for j in range(999999999) %}x{% endfor %}{% endfor %}"),
        "template broken": _changed("chat_template.jinja", lambda b: b"{% if %}"), "template that reaches out": _changed("chat_template.jinja", lambda b: b"{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    }  # fmt: skip
    for name, setup in setups.items():
        yield fit("model", name, layer, setup=setup)
    for name in (
        "m",
        "nobody/none",
        "nobody/none/x",
        "/none",
        "~/none",
        "models/none",
        "''",
        "' '",
        "../m",
        "a b",
        "http://h/m",
        "null",
    ):
        yield fit("model", f"path {name}", f"model: {{policy: {{tiny: null, path: {name}}}}}\n")
    yield fit("model", "critic path", "model: {objective: {recipe: ppo}, critic: {path: ./none}}\n")
    yield fit(
        "model",
        "model_args",
        layer.replace("}}", ", model_args: {nothing_known: 1}}}"),
        setup=_whole,
    )
    yield Case(
        "model",
        "check",
        ("check", "--config", "base.yaml", "--model.policy.tiny", "null", "--model.policy.path", "./m"),
        {"base.yaml": BASE},
    )
