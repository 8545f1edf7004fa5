"""What a run needs: a model of random weights, a tokenizer, prompts, and its configuration."""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_grpo.errors import UserError
from scripts.scaling_gpu_cases.keeper import kept
from scripts.scaling_gpu_cases.points import SHAPES, Point, cache_bytes

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = 4096
"""Different prompts, all of a length; a run goes on from the first again after them."""
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_END = "<|endoftext|>"
_LEARNING_RATE = 1e-5
_GRACE_SECONDS = 5.0


def prepare(shape: str, folder: Path, *, held: Sequence[int] = ()) -> Path:
    """Write model, tokenizer and prompts of a shape, unless they are there, and return their folder.

    Args:
        shape: name of the shape.
        folder: of the models of all shapes.
        held: descriptors of locks, held until nothing more is written.

    Raises:
        UserError: they cannot be written.
    """
    place = folder / shape
    if (place / "ready").is_file():
        return place
    try:
        place.mkdir(parents=True, exist_ok=True)
        # In a process of its own: what CUDA gave this one for it would be missing on a card in all that is measured.
        writer = [sys.executable, "-m", "scripts.scaling_gpu_cases.files", shape, str(place / "model")]
        with kept(writer, grace=_GRACE_SECONDS, held=held, cwd=ROOT) as process:
            if code := process.wait():
                raise OSError(f"its writer has ended with exit code {code}")
        write_tokenizer(SHAPES[shape].vocabulary, place / "model")
        write_prompts(shape, place / "prompts.jsonl")
        (place / "ready").touch()
    except OSError as error:
        raise UserError(
            f"the model of {shape} cannot be written to {place}: {error}",
            where="--models",
            remedy="name a folder that can be written to",
        ) from error
    return place


def write_model(shape: str, folder: Path) -> None:
    """Write a model of random weights, in bfloat16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    of = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=of.vocabulary,
        hidden_size=of.hidden,
        intermediate_size=of.intermediate,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        num_key_value_heads=of.kv_heads,
        tie_word_embeddings=of.tied,
        eos_token_id=of.vocabulary - 1,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    # Made in its format and where it is fast: 7 billion random numbers take minutes on one core.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model: Any = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)


def write_tokenizer(vocabulary: int, folder: Path) -> None:
    """Write a tokenizer of single bytes with a text for every id of the model; the last one ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Bytes, and no merges: transformers reads it by the class of the model's family, which goes by bytes.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"\u0120id{i}" for i in range(len(alphabet), vocabulary - 1)), _END]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_END, pad_token=_END)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def write_prompts(shape: str, path: Path) -> None:
    """Write prompts of random letters, as many as a prompt of the shape has tokens."""
    draw = random.Random(0)
    rows = ("".join(draw.choices(string.ascii_lowercase, k=SHAPES[shape].prompt)) for _ in range(PROMPTS))
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows), encoding="utf-8")


def configuration(point: Point, place: Path, run: Path, *, on_cards: bool, engine: str) -> dict[str, Any]:
    """Return the configuration of `lit-grpo fit` for a point.

    Args:
        point: what is measured.
        place: folder that :func:`prepare` returned.
        run: folder of the run.
        on_cards: False on a CPU.
        engine: ``vllm`` or ``transformers``.
    """
    shape = SHAPES[point.shape]
    policy: dict[str, Any] = {"path": str(place / "model")}
    if on_cards:
        policy |= {"attention": "varlen", "compile": True, "gradient_checkpointing": True}
    return {
        "seed_everything": 0,
        "model": {
            "policy": policy,
            "objective": {"recipe": "grpo"},
            "optimizer": {"lr": _LEARNING_RATE},
            "micro_batch_tokens": shape.micro_batch_tokens,
            "max_staleness": point.staleness,
        },
        "data": {
            "prompts": {
                "class_path": "lit_grpo.data.JsonlPrompts",
                "init_args": {"path": str(place / "prompts.jsonl")},
            },
            "rewards": [{"class_path": "scripts.scaling_gpu_cases.reward.EvenShare"}],
            "prompts_per_rollout": point.prompts,
            "group_size": shape.group_size,
            "rollouts": point.warmup + point.steps,
            "sampling": {"max_new_tokens": shape.completion},
            "engine": engine_settings(point, on_cards=on_cards, engine=engine),
        },
        "trainer": {
            "accelerator": "cuda" if on_cards else "cpu",
            "strategy": "fsdp",
            "devices": point.ranks,
            "enable_checkpointing": False,
            # Random weights cut all of their answers: nothing that is found of them ends the run.
            "callbacks": [
                {"class_path": "lit_grpo.callbacks.HealthMonitor", "init_args": {"actions": {"critical": "log"}}}
            ],
            "logger": {
                "class_path": "lit_grpo.tracking.RunLogger",
                "init_args": {"run_dir": str(run), "tracking_uri": "none"},
            },
        },
    }


def engine_settings(point: Point, *, on_cards: bool, engine: str) -> dict[str, Any]:
    """Return the settings of a point's engines."""
    if engine == "transformers":
        return {"name": "transformers"}
    shape = SHAPES[point.shape]
    args: dict[str, Any] = {"kv_cache_memory_bytes": cache_bytes(shape, point)}
    if on_cards:
        args |= {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "async_scheduling": True,
        }
    settings = {
        "name": "vllm",
        "processes": point.processes,
        "max_num_seqs": point.prompts // point.ranks * shape.group_size,
        "args": args,
    }
    if point.layout == "split":
        settings["cards"] = list(range(point.ranks, point.cards))
    return settings


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
