"""TRL's contestant: its GRPOTrainer, unedited, with a clock around its methods. Runs in TRL's environment."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from common import Clock, Talk, Work, by_gradient, mark
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):
    """Steps as they are asked for."""

    def __init__(self, clock: Clock, talk: Talk) -> None:
        self.clock, self.talk = clock, talk
        self.seen: dict[str, Any] = {"loss": 0.0}
        self.trainer: Any = None
        self.replayed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.begin()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._before = mark()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.clock.ends("optimizer", self._before)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen |= self.clock.read() | {"loss": float(self.seen["loss"])}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or "grad_norm" not in logs:
            return
        self.talk.say(
            **self.seen, grad_norm=float(logs["grad_norm"]), reward=float(logs.get("reward", float("nan"))),
            zero_gradient_groups=float(logs.get("frac_reward_zero_std", float("nan"))),
        )  # fmt: skip
        if not self.talk.wait():
            control.should_training_stop = True
        self.seen = {"loss": 0.0}
        self.clock.begin()


def main() -> None:
    work, talk, clock = Work.read(sys.argv[1]), Talk(), Clock()
    torch.set_num_threads(work.threads)
    total = len(work.questions) * work.group_size
    vllm = work.engine == "vllm"
    low = work.dtype == "bfloat16"
    length: dict[str, Any] = {}
    if work.exact_length:
        length = {"ignore_eos": True} if vllm else {"min_new_tokens": work.max_new_tokens}
    more: dict[str, Any] = {"generation_kwargs": length | ({"detokenize": False} if vllm else {})}
    if vllm:
        more |= {"vllm_mode": "colocate"}
    settings = {
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": total // work.micro_batch // work.devices,
        "num_generations": work.group_size,
        "max_completion_length": work.max_new_tokens,
        "max_steps": 10**6,
        "temperature": 1.0,
        "learning_rate": work.lr,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "shuffle_dataset": False,
        "bf16": low,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "use_vllm": vllm,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": work.seed,
        "model_init_kwargs": {"dtype": "float32"},
        "output_dir": tempfile.mkdtemp(prefix="trl-step-"),
    }

    def reward(prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        size, out = work.group_size, []
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            texts = [completion[0]["content"] for completion in completions[part]]
            out += work.reward(prompts[start][-1]["content"], completion_ids[part], texts)
        return out

    steps = Steps(clock, talk)
    if vllm:
        from trl.generation import vllm_generation

        vllm_generation.LLM = clock.makes_engine(vllm_generation.LLM)
    trainer = GRPOTrainer(
        model=work.model,
        args=GRPOConfig(**(settings | more | work.settings)),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in work.questions]),
        callbacks=[steps],
    )
    generate = trainer._generate_single_turn
    tokenizer = trainer.processing_class
    chats = [[{"role": "user", "content": q}] for q in work.questions]
    known = [
        tuple(
            tokenizer.apply_chat_template(c, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
        )
        for c in chats
    ]

    def given_first(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """The first step's samples are given; afterwards TRL's own."""
        if work.learner_only or not steps.replayed:
            steps.replayed = True
            trainer.vllm_importance_sampling_correction = False  # nothing sampled them
            count: Counter[int] = Counter()
            out = []
            for ids in prompt_ids:
                k = known.index(tuple(ids))
                out.append(list(work.replay[k][count[k] % work.group_size]))
                count[k] += 1
            made: Any = (out, [[0.0] * len(ids) for ids in out] if vllm else None)
        else:
            trainer.vllm_importance_sampling_correction = vllm
            made = generate(prompt_ids, *args, **kwargs)
        steps.seen["samples"] = len(prompt_ids) * work.devices
        steps.seen["tokens"] = sum(len(ids) for ids in made[0]) * work.devices
        steps.seen["prompt_tokens"] = sum(len(ids) for ids in known)
        return made

    trainer._generate_single_turn = clock.timed(given_first, "generate")
    clock.wrap(trainer, "_calculate_rewards", "reward")
    clock.wrap(
        trainer,
        "_get_per_token_logps_and_entropies",
        lambda: None if torch.is_grad_enabled() else "other passes",
    )
    compute = trainer._compute_loss

    def loss(*args: Any, **kwargs: Any) -> Any:
        out = compute(*args, **kwargs)
        steps.seen["loss"] = steps.seen["loss"] + out.detach()  # a number would wait for the GPU
        return out

    trainer._compute_loss = clock.timed(loss, by_gradient)
    clock.wrap(trainer.accelerator, "backward", "backward")
    if vllm:
        clock.wrap(trainer.vllm_generation, "sync_weights", "sync")
    trainer.train()


if __name__ == "__main__":
    main()
