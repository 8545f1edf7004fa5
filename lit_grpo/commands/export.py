"""``lit-grpo export``: turn a checkpoint into a Hugging Face model folder that transformers and vLLM load."""

from __future__ import annotations

import json
import logging
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_grpo.commands.model_card import CARD_FILE, make_card
from lit_grpo.errors import UserError
from lit_grpo.run.checkpoints import check_whole
from lit_grpo.tracking.registry import check_run, register
from lit_grpo.utils.files import move_into_place
from lit_grpo.utils.secrets import masked_text

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from lit_grpo.policy.config import PolicyConfig

log = logging.getLogger(__name__)

PREFIX = "policy.model."
"""Prefix of the names of the policy's weights in a checkpoint's ``state_dict``."""
DTYPES = ("float32", "bfloat16", "float16")


class Exported(NamedTuple):
    """Facts about the model folder that was written."""

    folder: Path
    architecture: str
    parameters: int
    """Number of parameters; tied ones count once."""
    dtype: str


def run(command: str, argv: list[str]) -> int:
    """Export a checkpoint, print what was written, and return the exit code."""
    from lit_grpo.cli.argument_parser import CommandParser

    parser = CommandParser(
        command,
        "Write the policy of a checkpoint as a Hugging Face model folder: weights, configuration, generation\n"
        "configuration and tokenizer, which makes prompts as the run did, and a model card. Read are the checkpoint,\n"
        "the configuration and tokenizer of the model that training began with, and for the card the run's folder.",
        "example:\n  lit-grpo export --checkpoint runs/NAME --output models/mine --dtype bfloat16",
    )
    parser.add_argument("--checkpoint", required=True, metavar="PATH", help="checkpoint, or the folder of a run")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="number format of the weights; as trained if left out")
    parser.add_argument("--base", metavar="DIR", help="where the model that training began with is now, if it moved")
    parser.add_argument("--adapter", action="store_true", help="the adapters alone, as peft loads them (LoRA)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that the model's folder brings")
    parser.add_argument("--force", action="store_true", help="replace a model folder that is there")
    parser.add_argument(
        "--register", metavar="NAME", help="also the next version of a model in MLflow's registry, below its run"
    )
    parser.add_argument(
        "--push", metavar="REPOSITORY", help="also a repository on the Hugging Face hub, ORGANISATION/NAME"
    )
    parser.add_argument("--private", action="store_true", help="a repository that --push makes is private")
    options = parser.parse_args(argv)
    if options.private and options.push is None:
        raise UserError("--private says how --push makes a repository", where="--private", remedy="add --push NAME")
    # Before the checkpoint is read, which takes long for a large one.
    run_of = None if options.register is None else check_run(_run_folder(Path(options.checkpoint)))
    path = _find(Path(options.checkpoint))
    _check_target(Path(options.output), options.force)
    if options.push is not None:
        from lit_grpo.commands.hub_upload import prepare

        options.push = prepare(options.push, private=options.private)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    exported = export(
        options.checkpoint,
        options.output,
        dtype=options.dtype,
        base=options.base,
        force=options.force,
        adapter=options.adapter,
        trust_remote_code=options.trust_remote_code,
        name=options.push,
    )
    print(f"{options.output}: {exported.architecture}, {exported.parameters / 1e6:.3g} M parameters, {exported.dtype}")
    if run_of is not None:
        version = register(exported.folder, options.register, *run_of)
        print(f"registered: {options.register}, version {version}, at {masked_text(run_of[0])}")
    if options.push is not None:
        from lit_grpo.commands.hub_upload import upload

        print(f"pushed: {upload(exported.folder, options.push, f'{path.name}, exported by lit-grpo')}")
    return 0


def export(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    base: str | os.PathLike[str] | None = None,
    force: bool = False,
    adapter: bool = False,
    trust_remote_code: bool = False,
    name: str | None = None,
) -> Exported:
    """Write the policy in ``checkpoint`` to the folder ``output``, whole or not at all.

    Args:
        checkpoint: a file, a folder of shards, or the folder of a run, whose last checkpoint is taken.
        output: the folder to write.
        dtype: ``float32``, ``bfloat16`` or ``float16``; None keeps the dtype of training.
        base: the folder of the model that training began with, if it has moved since.
        force: replace ``output`` if it holds a model.
        adapter: write the adapters alone, as peft does, instead of merging them.
        trust_remote_code: run the code that the model's folder brings. A checkpoint that says so is not enough, since
            it may be anybody's.
        name: name of the model in its card (README.md), say that of its repository; None: that of the folder.

    Raises:
        UserError: the checkpoint does not exist or is of something else, or the output folder is not empty.
    """
    path, target = _find(Path(checkpoint)), Path(output)
    # Before the checkpoint is read, which takes long for a large one.
    _check_target(target, force)
    content = _read(path)
    policy = _policy_config(content, path, base)
    policy = replace(policy, model_args=policy.model_args | {"trust_remote_code": trust_remote_code}
                     if policy.path else {})  # fmt: skip
    log.debug("the checkpoint %s is read", path)
    weights = {k.removeprefix(PREFIX): v for k, v in content["state_dict"].items() if k.startswith(PREFIX)}
    if not weights:
        raise UserError(f"the checkpoint {path} holds no policy weights ({PREFIX}*)", where="--checkpoint")
    card = make_card(name or target.name, content, policy, _run_folder(path), adapter=adapter)
    if adapter:
        from lit_grpo.commands.exported_adapter import write_adapter

        return write_adapter(weights, policy, _tokenizer(policy, content), dtype, target, card)
    # Adapters on 4-bit weights cannot be merged from the checkpoint alone, which does not hold the weights under them.
    if policy.quantization is not None:
        weights = _dequantized_weights(policy, content["state_dict"])
        policy = replace(policy, lora=None, quantization=None)
    elif policy.lora is not None:
        from lit_grpo.policy.model.lora import merged

        weights = dict(merged(weights, policy.lora.alpha / policy.lora.rank))
        # The merged model has no adapters, so that loading it needs no peft.
        policy = replace(policy, lora=None)
    model = _model(policy, weights, dtype, path)
    log.debug("writing %s", target)
    _write(model, policy, content, target, card)
    count = sum(parameter.numel() for parameter in model.parameters())
    return Exported(target, type(model).__name__, count, str(model.dtype).removeprefix("torch."))


def _run_folder(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint, or the folder itself, belongs to."""
    return checkpoint if (checkpoint / "checkpoints").is_dir() else checkpoint.absolute().parent.parent


def _find(path: Path) -> Path:
    if (path / "checkpoints" / "last.ckpt").exists():
        return path / "checkpoints" / "last.ckpt"
    if path.is_file() or (path / "meta.pt").is_file():
        return path
    if path.is_dir():
        raise UserError(
            f"the folder {path} is neither a sharded checkpoint nor the folder of a run with checkpoints",
            where="--checkpoint",
            remedy="give a file like runs/NAME/checkpoints/rollout-000100.ckpt, or the folder runs/NAME",
        )
    raise UserError(f"there is no checkpoint {path}", where="--checkpoint", remedy=_list_checkpoints(path))


def _list_checkpoints(path: Path) -> str:
    names = sorted(p.name for p in path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
    return (
        f"{path.parent} has {', '.join(names)}"
        if names
        else "give the path of one, as runs/NAME/checkpoints/last.ckpt, or the folder runs/NAME"
    )


def _check_target(target: Path, force: bool) -> None:
    if target.is_file():
        raise UserError(f"{target} is a file", where="--output", remedy="name a folder")
    if not target.is_dir() or not any(target.iterdir()):
        return
    if not force:
        raise UserError(
            f"the folder {target} is not empty",
            where="--output",
            remedy="name another one, or add --force to replace it",
        )
    if not (target / "config.json").is_file():
        # Otherwise a mistyped --output with --force could empty somebody's home.
        raise UserError(
            f"the folder {target} holds something that is no model, and --force replaces only model folders",
            where="--output",
            remedy="name another one",
        )


def _read(path: Path) -> dict[str, Any]:
    import torch

    try:
        check_whole(path)
    except UserError as error:
        raise UserError(error.what, where="--checkpoint", remedy=error.remedy) from error
    try:
        if path.is_dir():
            from lit_grpo.distributed.checkpoint import read_sharded

            content: Any = read_sharded(path, optimizers=False)
        else:
            # weights_only: a checkpoint from elsewhere must not run code. torch maps only its zip format into memory.
            content = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:
        first = str(error).strip().partition("\n")[0][:200]
        raise UserError(f"the checkpoint {path} cannot be read: {first}", where="--checkpoint") from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"{path} is no checkpoint of a Lightning run", where="--checkpoint")
    return content


def _policy_config(content: dict[str, Any], path: Path, base: str | os.PathLike[str] | None) -> PolicyConfig:
    from lit_grpo.policy.config import PolicyConfig
    from lit_grpo.utils.dataclasses import dataclass_from_dict

    settings = content.get("hyper_parameters", {}).get("policy")
    try:
        policy = dataclass_from_dict(PolicyConfig, settings)
    except TypeError as error:
        raise UserError(
            f"the checkpoint {path} does not say which model it trained: {error}",
            where="--checkpoint",
            remedy="give one that lit-grpo fit wrote",
        ) from error
    return replace(policy, path=str(base), tiny=None) if base is not None else policy


def _dequantized_weights(policy: PolicyConfig, state: dict[str, Tensor]) -> dict[str, Tensor]:
    # The checkpoint holds only the adapters. The weights under them come from the model's folder, through the 4 bits of
    # training, so that the exported model is the one that was trained.
    from lit_grpo.policy.forward.policy import Policy
    from lit_grpo.policy.model.load import load_model

    trained = Policy(load_model(policy))
    saved = {k.removeprefix("policy."): v for k, v in state.items() if k.startswith("policy.")}
    trained.load_state_dict({k: v for k, v in saved.items() if not k.startswith("value_head.")})
    return {name: tensor.cpu().clone() for name, tensor in trained.named_weights()}


def _model(policy: PolicyConfig, weights: dict[str, Tensor], dtype: str | None, path: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    from lit_grpo.policy.model.arguments import TRUST, loader_arguments
    from lit_grpo.policy.model.load import load_model_config

    try:
        config = load_model_config(policy)
    except UserError as error:
        remedy = "if the folder has moved, say where it is now with --base"
        if error.where == TRUST:
            remedy = "read the code, then add --trust-remote-code"
        raise UserError(error.what, where=f"policy of {path}", remedy=remedy) from error
    to_dtype = getattr(torch, dtype) if dtype else next(iter(weights.values())).dtype
    # On the meta device: no time and memory for weights that are replaced at once.
    with torch.device("meta"):
        known = {k: v for k, v in loader_arguments(policy).place.items() if k in ("trust_remote_code", "code_revision")}
        model = AutoModelForCausalLM.from_config(config, dtype=to_dtype, **known)
    weights = {name: tensor.to(to_dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    # Assigned tensors are not tied, and a tied weight may be there under one of its names only.
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing or unexpected:
        wrong = f"{missing[0]} is missing" if missing else f"{unexpected[0]} has no place in it"
        raise UserError(
            f"the weights of {path} do not fit {type(model).__name__}: {wrong} "
            f"({len(missing)} missing, {len(unexpected)} too many)",
            where="--base" if policy.tiny is None else "--checkpoint",
            remedy="give the model that training began with",
        )
    return model


def _tokenizer(policy: PolicyConfig, content: dict[str, Any]) -> Any:
    """Return the tokenizer with the chat template of the run, whose prompts plain transformers then makes alike."""
    from lit_grpo.commands.exported_template import template_for
    from lit_grpo.policy.model.load import load_tokenizer

    tokenizer = load_tokenizer(policy)
    identity = content.get("RolloutDataModule", {}).get("format")
    # Runs of one's own programs may have other data.
    if isinstance(identity, dict):
        tokenizer.chat_template = template_for(identity, tokenizer)
    return tokenizer


def _generation(policy: PolicyConfig, content: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return what the generation configuration says anew: where a text ends, and how the run sampled."""
    from lit_grpo.policy.model.load import end_token_ids

    settings = content.get("callbacks", {}).get("RunSettings", {}).get("settings", {})
    ends = {*end_token_ids(policy, tokenizer), *(settings.get("data.sampling.stop_token_ids") or ())}
    found: dict[str, Any] = {"eos_token_id": sorted(ends)}
    if tokenizer.pad_token_id is not None:
        found["pad_token_id"] = tokenizer.pad_token_id
    if (temperature := settings.get("data.sampling.temperature")) is not None:
        found["do_sample"] = temperature > 0
        names = {"top_p": "top_p", "top_k": "top_k", "max_new_tokens": "max_new_tokens"}
        sampled = {name: settings.get(f"data.sampling.{key}") for name, key in names.items()}
        found |= {name: value for name, value in sampled.items() if value is not None}
        # Of greedy decoding transformers wants no temperature.
        found |= {"temperature": temperature if temperature > 0 else None}
    return found


def _write(model: PreTrainedModel, policy: PolicyConfig, content: dict[str, Any], target: Path, card: str) -> None:
    from lit_grpo.policy.model.load import generation_file

    tokenizer = _tokenizer(policy, content)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        base, written = generation_file(policy), temporary / "generation_config.json"
        if base is not None:
            # Copied as a file: transformers refuses to write some of the configurations that it reads.
            shutil.copy(base, written)
        _update(written, _generation(policy, content, tokenizer))
        (temporary / CARD_FILE).write_text(card, encoding="utf-8")
        move_into_place(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _update(file: Path, values: dict[str, Any]) -> None:
    """Set values of a JSON file; one that says all of them already stays as it is, byte for byte."""
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    new = {name: value for name, value in values.items() if not _says(saved, name, value)}
    if new:
        # With this mark transformers would go by the model's configuration and not by this file.
        saved.pop("_from_model_config", None)
        merged = {name: value for name, value in (saved | new).items() if value is not None}
        file.write_text(json.dumps(merged, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _says(saved: dict[str, Any], name: str, value: Any) -> bool:
    given = saved.get(name)
    if name == "eos_token_id" and given is not None:
        return sorted(given if isinstance(given, list) else [given]) == value
    # A padding token that nobody has named is the tokenizer's.
    return name == "pad_token_id" or given == value
