"""What a configuration needs: model, data, packages, cards, memory and disk, told from the settings alone.

Nothing is fetched or loaded, and the hub is not asked, so that what a run for other machines needs can be read on any.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lit_grpo.commands.check.cost import gib
from lit_grpo.commands.check.result import Result
from lit_grpo.data.sources.benchmarks import BENCHMARKS
from lit_grpo.engines.vllm.arguments import spread
from lit_grpo.errors import UserError
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.objective import Objective
from lit_grpo.policy.config import CriticConfig, OptimizerConfig, PolicyConfig
from lit_grpo.policy.model.load import load_model
from lit_grpo.utils.dataclasses import dataclass_from_dict
from lit_grpo.utils.text import in_units

_BILLIONS = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(?![A-Za-z0-9])")
"""The number of parameters in the name of a model: 7B, 1.5B, 135M; not the A3B of those that are active at a time."""
_UNITS = {"b": 10**9, "m": 10**6}
_BYTES = {"float32": 4.0, "bfloat16": 2.0}
_FOUR_BITS = {True: 4.13 / 8, False: 4.5 / 8}
"""Bytes of a weight of 4 bits, by whether the scales of its blocks are quantized too."""
_CARDS = (24, 40, 48, 80, 96, 141, 180)
"""Memory of cards that are common, in GB."""
_ROOM = 0.8
"""Share of a card that weights and optimizer may fill; activations and key-value cache need the rest. Ours."""
_SOURCES = "lit_grpo.data."


@dataclass(frozen=True)
class Size:
    """The number of parameters of a model, and where it is known from."""

    parameters: int | None
    """None: it stands nowhere."""
    known_from: str
    """In words: ``by its name``, ``by its configuration``."""


def needs(config: Mapping[str, Any]) -> list[Result]:
    """Say what a run needs, one line for each kind of need, and what of it is not on this machine.

    Args:
        config: the configuration of ``fit``, parsed, with every default filled in, as nested dictionaries.

    Raises:
        UserError: the objective, the policy or the critic contradict themselves, or a server's ranks are no numbers.
    """
    model, data, trainer = config["model"], config["data"], config["trainer"]
    policy = dataclass_from_dict(PolicyConfig, model["policy"])
    objective = dataclass_from_dict(ObjectiveConfig, model["objective"]).resolve()
    size = size_of(policy)
    return [
        _model(policy, size),
        *_data(data),
        _packages(policy, objective, data, model["optimizer"]),
        _cards(trainer, {} if objective.demonstrations else data["engine"]),
        _memory(model, policy, objective, size, trainer, data["engine"]),
        _disk(policy, size, config),
    ]


# ------------------------------------------------------------------------------------------------------ model, data


def size_of(policy: PolicyConfig) -> Size:
    """Count the parameters of a model: by its configuration, if that is on this machine, else by its name."""
    if policy.tiny is not None or _is_here(policy):
        bare = replace(policy, lora=None, quantization=None, compile=False, gradient_checkpointing=False)
        try:
            # Without weights: neither time nor memory.
            with torch.device("meta"):
                model: Any = load_model(bare)
            return Size(sum(p.numel() for p in model.parameters()), "by its configuration")
        except UserError:
            # What is wrong with the folder is said where the model is loaded.
            pass
    found = _BILLIONS.search(Path(policy.path or "").name)
    if found is None:
        return Size(None, "its name does not say how large it is")
    return Size(int(float(found[1]) * _UNITS[found[2].lower()]), "by its name")


def _is_here(policy: PolicyConfig) -> bool:
    """Tell whether the configuration of a model is on this machine: a folder, or a copy in the hub's cache."""
    assert policy.path is not None
    if (Path(policy.path).expanduser() / "config.json").is_file():
        return True
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(policy.path, "config.json"), str)
    except HFValidationError:
        return False


def _model(policy: PolicyConfig, size: Size) -> Result:
    count = "" if size.parameters is None else f"{in_units(size.parameters)} parameters, "
    values = {"path": policy.path, "parameters": size.parameters}
    if policy.tiny is not None:
        return Result("model", "pass", f"made on the spot: {count}nothing to fetch", values=values)
    assert policy.path is not None
    found = f"{policy.path}: {count}{size.known_from}"
    if _is_here(policy):
        return Result("model", "pass", f"{found}; it is here", values=values)
    fetch = "" if size.parameters is None else f", {gib(2 * size.parameters)} to fetch in bfloat16"
    return Result(
        "model",
        "warn",
        f"{found}{fetch}; it is not on this machine",
        f"fetch it where there is a network: hf download {policy.path}",
        values,
    )


def _data(data: Mapping[str, Any]) -> Iterator[Result]:
    named: list[tuple[str, Any]] = [("training data", data.get("prompts"))]
    for key in ("val", "test"):
        named += [(f"{key} {name}", one) for name, one in (data.get(key) or {}).items()]
        named.append((f"{key} set", data.get(f"{key}_prompts")))
    for name, source in named:
        for where, here in _places(source, name.partition(" ")[2]):
            if here:
                yield Result(name, "pass", where, values={"here": True})
                continue
            remedy = "fetch it where there is a network, or put the file there"
            yield Result(name, "warn", f"{where}; not on this machine", remedy, {"here": False})


def _places(source: Any, name: str) -> Iterator[tuple[str, bool]]:
    """Yield where the questions of a source come from, in words, and whether that is on this machine."""
    if source is None:
        return
    if isinstance(source, str):
        yield source, bool(_paths(source))
    elif "class_path" in source:
        yield from _places_of_class(str(source["class_path"]), dict(source.get("init_args") or {}))
    # An evaluation set: a source, a file, or the benchmark that it is named after.
    elif source.get("prompts") is not None:
        yield from _places(source["prompts"], name)
    elif name in BENCHMARKS:
        yield from _benchmark(name, "test", source.get("path"))
    elif source.get("path") is not None:
        yield str(source["path"]), bool(_paths(source["path"]))


def _places_of_class(class_path: str, given: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    kind = class_path.removeprefix(_SOURCES).rpartition(".")[2]
    if kind == "MixedPrompts":
        for one in given.get("sources") or []:
            yield from _places(one, "")
    elif kind == "BenchmarkPrompts":
        yield from _benchmark(str(given.get("benchmark")), str(given.get("split") or "test"), given.get("path"))
    elif kind == "HubPrompts":
        dataset, files = str(given.get("dataset")), given.get("data_files")
        part = ", ".join(str(x) for x in (given.get("config"), files, given.get("split")) if x)
        yield f"{dataset} of the hub ({part})", _hub_set_is_here(dataset)
    elif (path := given.get("path")) is not None:
        yield ", ".join(path) if isinstance(path, list) else str(path), bool(_paths(path))
    else:
        yield f"{kind}, made on the spot or of your own code", True


def _benchmark(name: str, split: str, path: str | None) -> Iterator[tuple[str, bool]]:
    if path is not None:
        yield path, bool(_paths(path))
    elif (known := BENCHMARKS.get(name)) is not None:
        chosen = known.train if split == "train" else known.split
        questions = "" if split == "train" else f", {known.prompts} questions"
        yield f"{known.dataset} of the hub ({chosen}{questions})", _hub_set_is_here(known.dataset)


def _paths(path: Any) -> list[Path]:
    listed = path if isinstance(path, list) else [path]
    found = [
        sorted(Path().glob(p)) if not Path(p).is_absolute() else [Path(p)] for p in map(os.path.expanduser, listed)
    ]
    return [one for some in found for one in some if one.exists()]


def _hub_set_is_here(dataset: str) -> bool:
    if Path(dataset).expanduser().exists():
        return True
    try:
        from datasets import config
    except ImportError:
        return False
    flat = dataset.replace("/", "___").lower()
    return any(folder.name.lower() == flat for folder in Path(config.HF_DATASETS_CACHE).glob("*"))


def _packages(policy: PolicyConfig, objective: Objective, data: Mapping[str, Any], optimizer: Any) -> Result:
    wanted = {
        "vllm": str(data["engine"]["name"]).startswith("vllm") and not objective.demonstrations,
        "datasets": any("of the hub" in result.found for result in _data(data)),
        "peft": policy.lora is not None,
        "bitsandbytes": policy.quantization is not None or str(optimizer["type"]).startswith("bitsandbytes."),
        "torchao": str(optimizer["type"]).startswith("torchao."),
    }
    extras = {"datasets": "hub", "peft": "lora", "bitsandbytes": "quantized", "torchao": "quantized"}
    names = [name for name, needed in wanted.items() if needed]
    missing = [name for name in names if find_spec(name) is None]
    if not missing:
        return Result("packages", "pass", f"{', '.join(names) or 'none'} besides those of every run",
                      values={"packages": names})  # fmt: skip
    install = ",".join(dict.fromkeys(extras.get(name, name) for name in missing))
    return Result("packages", "warn", f"{', '.join(names)}; not installed here: {', '.join(missing)}",
                  f"pip install 'lit-grpo[{install}]' -c constraints.txt", {"packages": names})  # fmt: skip


# ------------------------------------------------------------------------------------------------- cards, memory, disk


def processes(trainer: Mapping[str, Any]) -> int:
    """Count the processes that train: cards times machines; on this machine's own number of cards where it is open."""
    devices, nodes = trainer.get("devices", "auto"), int(trainer.get("num_nodes") or 1)
    if isinstance(devices, str) and devices.isdigit():
        devices = int(devices)
    if isinstance(devices, list):
        return len(devices) * nodes
    if isinstance(devices, int) and devices > 0:
        return devices * nodes
    return max(1, torch.cuda.device_count()) * nodes


def _cards(trainer: Mapping[str, Any], engine: Mapping[str, Any]) -> Result:
    nodes, here = int(trainer.get("num_nodes") or 1), torch.cuda.device_count()
    each = processes(trainer) // nodes
    if trainer.get("accelerator") == "cpu":
        return Result("cards", "pass", f"none: {each} processes on the CPU", values={"cards": 0, "here": here})
    learn, sample = each, _cards_of_engines(engine)
    each += sample
    found = f"{each * nodes}" + (f", {each} on each of {nodes} machines" if nodes > 1 else "")
    found += f" (trainer.strategy {_strategy(trainer)})"
    found += f", {learn} to learn and {sample} for the engines" if sample else ""
    found += " on each" if sample and nodes > 1 else ""
    found += f"; {here} here"
    values = {"cards": each * nodes, "machines": nodes, "here": here}
    values |= {"engine_cards": sample * nodes} if sample else {}
    if each > here and each > 1:
        return Result("cards", "warn", found, "start it where they are; fewer are set by --trainer.devices", values)
    return Result("cards", "pass", found, values=values)


def _cards_of_engines(engine: Mapping[str, Any]) -> int:
    """Count the cards of a machine that its engines have for themselves."""
    if engine.get("name") == "vllm":
        return len(engine.get("cards") or [])
    server = engine.get("server") or {}
    return sum(map(len, server.get("cards") or [])) if engine.get("name") == "vllm_server" else 0


def _strategy(trainer: Mapping[str, Any]) -> str:
    strategy = trainer.get("strategy") or "auto"
    return str(strategy["class_path"]).rpartition(".")[2] if isinstance(strategy, Mapping) else str(strategy)


def _memory(
    model: Mapping[str, Any],
    policy: PolicyConfig,
    objective: Objective,
    size: Size,
    trainer: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> Result:
    if size.parameters is None:
        return Result("card memory", "warn", "not known, since the size of the model is not",
                      "lit-grpo check measures it where the model is")  # fmt: skip
    optimizer = dataclass_from_dict(OptimizerConfig, model["optimizer"])
    shards = processes(trainer) if _strategy(trainer) in ("fsdp", "ModelParallelStrategy", "FSDP2Strategy") else 1
    parts = {"policy": _state(policy, size.parameters, optimizer)}
    if objective.advantage.critic:
        critic = dataclass_from_dict(CriticConfig, model["critic"] or {})
        if critic.backbone == "separate":
            own = size_of(replace(policy, path=critic.path, tiny=critic.tiny)) if critic.path or critic.tiny else size
            parts["critic"] = _state(policy, own.parameters or 0, critic.optimizer or optimizer)
    if objective.regularizers.kl_coef and policy.lora is None:
        parts["reference"] = int(size.parameters * _BYTES[policy.dtype])
    learner = sum(parts.values()) / shards
    values: dict[str, Any] = {**parts, "shards": shards, "learner_per_card": int(learner)}
    words = ", ".join(f"{name} {gib(part)}" for name, part in parts.items())
    found = f"{words} ({'frozen weights' if policy.lora is not None else 'weights, gradients, moments'})"
    found += f" over {shards} cards: {gib(int(learner))} each" if shards > 1 else ""
    if policy.lora is not None:
        found += ", adapters not counted"
    total = learner
    weights = _weights_of_engine(engine, size.parameters)
    if weights and policy.tiny is None and not objective.demonstrations:
        values["engine_per_card"] = int(weights)
        # The learner's part stays on the card while vLLM samples, asleep or not, unless engines have their own cards.
        total = max(total, weights) if _cards_of_engines(engine) else total + weights
        found += f"; vLLM's weights {gib(int(weights))} a card"
    values["per_card"] = int(total)
    fitting = next((card for card in _CARDS if total <= _ROOM * card * 10**9), None)
    found += f"; {gib(int(total))} a card before activations and key-value cache"
    if policy.tiny is not None or trainer.get("accelerator") == "cpu":
        return Result("card memory", "pass", found, values=values)
    if fitting is None:
        return Result("card memory", "warn", f"{found}, more than a card of {_CARDS[-1]} GB has",
                      "spread it over more cards: trainer.strategy fsdp, trainer.devices, trainer.num_nodes",
                      values)  # fmt: skip
    values["card_gb"] = fitting
    return Result("card memory", "pass", f"{found}: cards of {fitting} GB or more", values=values)


def _weights_of_engine(engine: Mapping[str, Any], parameters: int) -> float:
    """Count the bytes of weights on a card where an engine samples; 0: it has none that is known."""
    weights = (4.0 if engine.get("dtype") == "float32" else 2.0) * parameters
    if engine["name"] == "vllm":
        # Each process holds all of them.
        number = engine.get("processes")
        return weights * (number if isinstance(number, int) else 1)
    if not _cards_of_engines(engine):
        return 0.0
    # Ranks of data parallelism hold all of them too.
    ranks = spread(engine.get("args") or {})
    return weights * ranks["data_parallel_size"] / math.prod(ranks.values())


def _state(policy: PolicyConfig, parameters: int, optimizer: OptimizerConfig) -> int:
    """Count the bytes of weights, gradients and the optimizer's two moments."""
    if policy.lora is not None:
        frozen = _FOUR_BITS[policy.quantization.double] if policy.quantization else _BYTES[policy.dtype]
        return int(parameters * frozen)
    moments = 2.0 if "8bit" in optimizer.type else 2 * _BYTES[policy.dtype]
    return int(parameters * (2 * _BYTES[policy.dtype] + moments))


def _disk(policy: PolicyConfig, size: Size, config: Mapping[str, Any]) -> Result:
    checkpoint, trainer = config.get("checkpoint") or {}, config["trainer"]
    place = Path(checkpoint.get("dirpath") or trainer.get("default_root_dir") or ".").expanduser().absolute()
    existing = next(folder for folder in (place, *place.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    values: dict[str, Any] = {"free": free}
    if trainer.get("enable_checkpointing") is False:
        return Result("disk", "pass", f"no checkpoints are saved; {gib(free)} free", values=values)
    if policy.lora is not None:
        return Result("disk", "pass", f"checkpoints hold adapters alone; {gib(free)} free", values=values)
    if size.parameters is None:
        return Result("disk", "pass", f"how large checkpoints are is not known; {gib(free)} free", values=values)
    # Weights and both moments.
    each = int(size.parameters * 3 * _BYTES[policy.dtype])
    kept = checkpoint.get("keep_last")
    every = int(checkpoint.get("every_n_rollouts") or 50)
    saved = max(1, -(-int(config["data"]["rollouts"]) // every))
    # One more while the newest is written and the oldest is still there.
    count = saved if kept is None else min(saved, int(kept)) + int(checkpoint.get("keep_best") or 0) + 1
    values |= {"checkpoint": each, "checkpoints": count}
    found = f"checkpoints of {gib(each)}, at most {count}: {gib(each * count)}; {gib(free)} free in {existing}"
    if each * count > free:
        return Result("disk", "warn", found, "checkpoint.dirpath is the place; saving pauses on a full disk", values)
    return Result("disk", "pass", found, values=values)
