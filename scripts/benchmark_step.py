#!/usr/bin/env python3
r"""Measure what one training step costs and where its time goes: ours, ours without each saving, and TRL's.

    python scripts/benchmark_step.py                                    # SmolLM2-135M, GSM8K, float32, CPU
    python scripts/benchmark_step.py --peer trl                         # beside TRL's GRPOTrainer, A-B-A-B
    python scripts/benchmark_step.py --shape qwen2-1.5b --dtype bfloat16 --engine vllm --prompts 64 \
        --max-new-tokens 256 --micro-batch 32 --savings --peer trl      # on a GPU, random weights

Every contestant is a process of its own with the same model, prompts, group size, lengths, dtype, engine and threads,
and does nothing while another one works. The first step of each is on the same given samples: its loss and gradient
norm show that the work is equal. It also warms up and is not counted. Medians are over the other steps.

``seconds a phase`` are CPU seconds, on CUDA wall seconds. Rewards are artificial by default, the same function of the
ids on both sides (``half``): half of each group gets 1, so that no group is without gradient and may be left out.
``--rewards answer`` looks for the right number instead, which a small model hardly ever writes.

Other programs on the machine slow everything down, CPU seconds included (caches, memory): compare within one run.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ROOT / "scripts" / "step_benchmark"
sys.path[:0] = [str(PARTS), str(ROOT / "scripts"), str(ROOT)]

from common import MARK, PHASES, Work  # noqa: E402

TRL = "trl==1.16.0"
FORMAT = "{question}\n\nThink step by step, then end with: The answer is <number>."
SAVINGS: dict[str, dict[str, Any]] = {
    "no shared prompts": {"policy": {"share_prompts": False}},
    "no packing": {"policy": {"pack": False}},
    "no token budget": {"model": {"micro_batch_tokens": None}},
    "no skipping": {"model": {"zero_advantage_samples": None}},
    "whole logits": {"policy": {"logits_chunk": 2**40}},
    "no shared cache": {"share_decoding_cache": False},
}
"""Saving -> the settings that switch it off."""
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Part of a card's name -> dense bfloat16 TFLOPS, as the maker states them."""


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="benchmark-step-") as name:
        folder = Path(name)
        work = make_work(args, folder)
        print(describe(args, work), flush=True)
        rows: list[tuple[str, list[dict[str, Any]]]] = []
        if args.peer:
            rows += beside_peer(args, work, folder)
        if args.savings or not args.peer:
            chosen = {k: v for k, v in SAVINGS.items() if applies(v)} if args.savings else {}
            for title, settings in [("ours", {}), *chosen.items()]:
                rows.append((title, alone(args, work, folder, title, settings)))
                keep(args, rows)
        print_table(rows, work, args)
    return 0


def keep(args: argparse.Namespace, rows: Iterable[tuple[str, list[dict[str, Any]]]]) -> None:
    """Print what has been measured so far, also of a benchmark that does not come to its end."""
    if args.json:
        Path(args.json).write_text(json.dumps([{"name": n, "steps": s} for n, s in rows], indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default=str(ROOT / "models" / "SmolLM2-135M-Instruct"), help="folder of a Hugging Face model")
    add("--shape", help="random weights of this shape instead (see benchmark_rollout.py), with --model's tokenizer")
    add("--data", help="JSON lines with prompt and answer; default: data/ or ../shared/data/gsm8k_train.jsonl.gz")
    add("--prompts", type=int, default=2, help="of each step")
    add("--group-size", type=int, default=8)
    add("--max-new-tokens", type=int, default=64)
    add("--natural-length", action="store_true", help="completions end where the model ends them")
    add("--learner-only", action="store_true", help="every step is on the given completions; nothing is sampled")
    add("--rewards", choices=["half", "answer"], default="half")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--engine", choices=["transformers", "vllm"], default="transformers")
    add("--engine-args", type=json.loads, default={}, help="ours: further fields of EngineConfig, as JSON")
    add("--ours", type=json.loads, default={}, help='ours: further settings, as JSON: {"policy": {...}, "model": ...}')
    add("--micro-batch", type=int, default=8, help="completions at once (ours: without token budget)")
    add("--steps", type=int, default=2, help="measured steps of each contestant (in each round beside a peer)")
    add("--warmup", type=int, help="further steps that are not counted; default: 1 with vllm, which compiles, else 0")
    add("--rounds", type=int, default=2, help="A-B: how often, beside a peer")
    add("--threads", type=int, default=1)
    add("--devices", type=int, default=1, help="GPUs or CPU ranks of each contestant")
    add("--strategy", help="of our Trainer; default: fsdp for bfloat16 (float32 weights, as the peer's), else auto")
    add("--lr", type=float, default=1e-6)
    add("--savings", action="store_true", help="also each saving switched off in turn")
    add("--peer", choices=["trl"])
    add("--peer-python", help="of an environment with TRL; default: one is made in .venv-trl")
    add("--peer-micro-batch", type=int, help="the peer's own, if another one is its best")
    add("--peer-args", type=json.loads, default={}, help="further fields of its GRPOConfig, as JSON")
    add("--restart", action="store_true", help="start contestants anew in every round: both may not fit on a card")
    add("--peak-tflops", type=float, help="of the card, for the model FLOP utilisation")
    add("--json", help="write every step here, as it is taken")
    args = parser.parse_args()
    if args.warmup is None:
        args.warmup = int(args.engine == "vllm" and not args.learner_only)
    if args.group_size * args.prompts % ((args.peer_micro_batch or args.micro_batch) * args.devices):
        parser.error("prompts x group size must be a multiple of the micro-batch")
    return args


# ------------------------------------------------------------------------------------------------ the work


def make_work(args: argparse.Namespace, folder: Path) -> Work:
    model = Path(args.model)
    if args.shape:
        model = random_model(args.shape, model, folder / "model")
    rows = read_rows(args, 2 * args.prompts + args.group_size)
    questions = [FORMAT.replace("{question}", row["prompt"]) for row in rows[: args.prompts]]
    return Work(
        model=str(model),
        questions=questions,
        answers=[row["answer"] for row in rows[: args.prompts]],
        group_size=args.group_size,
        max_new_tokens=args.max_new_tokens,
        exact_length=not args.natural_length,
        rewards=args.rewards,
        dtype=args.dtype,
        engine=args.engine,
        micro_batch=args.micro_batch,
        threads=args.threads,
        lr=args.lr,
        replay=given_samples(model, [row["prompt"] for row in rows[args.prompts :]], args),
        devices=args.devices,
        learner_only=args.learner_only,
    )


def read_rows(args: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    places = [args.data] if args.data else [ROOT / "data", ROOT.parent / "shared" / "data"]
    paths = [Path(p) if args.data else Path(p) / "gsm8k_train.jsonl.gz" for p in places]
    path = next((p for p in paths if p.is_file()), None)
    if path is None:
        sys.exit(f"no prompts in {', '.join(map(str, paths))}: run scripts/get_gsm8k, or name a file with --data")
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    return [rows[i % len(rows)] for i in range(count)]


def given_samples(model: Path, texts: list[str], args: argparse.Namespace) -> list[list[list[int]]]:
    """Make completions for the first step: other questions' texts, of unequal lengths."""
    from transformers import AutoTokenizer

    encoded = AutoTokenizer.from_pretrained(model)(texts, add_special_tokens=False)["input_ids"]
    groups = []
    for g in range(args.prompts):
        group = []
        for i in range(args.group_size):
            ids = encoded[(g + i) % len(encoded)]
            length = max(1, args.max_new_tokens - (3 * i + g) % (args.max_new_tokens // 2 + 1))
            group.append((ids * (length // len(ids) + 1))[:length])
        groups.append(group)
    return groups


def random_model(shape: str, tokenizer: Path, folder: Path) -> Path:
    """Write a Qwen2-shaped model with random weights and a tokenizer that has a text for every id."""
    from benchmark_rollout import SHAPES, write_shape

    folder.mkdir()
    write_shape(shape, folder)
    for file in tokenizer.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "added_tokens")):
            shutil.copy(file, folder / file.name)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    known = content["model"]["vocab"]
    first = 1 + max([*known.values(), *(t["id"] for t in content["added_tokens"])])
    known.update({f"\u0120id{i}": i for i in range(first, SHAPES[shape][5])})
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


# ------------------------------------------------------------------------------------------------ contestants


class Contestant:
    """A process that takes steps when told to; it starts while others do, and the first question waits for it."""

    def __init__(self, python: str, script: str, work: Work, folder: Path, title: str) -> None:
        self.title = title
        path = folder / f"{title.replace(' ', '-')}.json"
        work.write(path)
        start = ["-m", "torch.distributed.run", f"--nproc-per-node={work.devices}"] if work.devices > 1 else []
        threads = str(work.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        if python != sys.executable:
            environment.pop("PYTHONPATH", None)
        self.log = folder / f"{title.replace(' ', '-')}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [python, *start, str(PARTS / script), str(path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True,
            )  # fmt: skip

    @functools.cached_property
    def first(self) -> dict[str, Any]:
        """Take the step on the given samples."""
        return self._read()

    def steps(self, count: int) -> list[dict[str, Any]]:
        _ = self.first
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return [self._read() for _ in range(count)]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        talk = []
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[len(MARK) :]))
            talk.append(line)
        self.process.wait()
        tail = "".join(talk[-20:]) + self.log.read_text()[-3000:]
        sys.exit(f"{self.title} ended with code {self.process.returncode}:\n{tail}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def applies(settings: dict[str, Any]) -> bool:
    """Whether this version has what the settings switch off."""
    import inspect
    from dataclasses import fields

    from lit_grpo import LitGRPO
    from lit_grpo.policy import PolicyConfig

    known = {"policy": {f.name for f in fields(PolicyConfig)}, "model": set(inspect.signature(LitGRPO).parameters)}
    return all(set(values) <= known[part] for part, values in settings.items() if part in known)


def ours(args: argparse.Namespace, work: Work, folder: Path, title: str, settings: dict[str, Any]) -> Contestant:
    strategy = args.strategy or ("fsdp" if args.dtype == "bfloat16" else "auto")
    settings = merged({"strategy": strategy, "engine": args.engine_args}, merged(args.ours, settings))
    if settings.get("model", {}).get("micro_batch_tokens", 0) is None:
        settings["model"] = settings["model"] | {"micro_batch_size": args.micro_batch}
    return Contestant(sys.executable, "ours.py", replaced(work, settings), folder, title)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Lay ``above`` over ``below``, inner dictionaries too."""
    both = below.keys() & above.keys()
    inner = {k: below[k] | above[k] for k in both if isinstance(below[k], dict) and isinstance(above[k], dict)}
    return below | above | inner


def alone(
    args: argparse.Namespace, work: Work, folder: Path, title: str, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    with ours(args, work, folder, title, settings) as contestant:
        contestant.steps(args.warmup)
        steps = contestant.steps(args.steps)
    print(f"{title}: on the given samples {said(contestant.first)}", flush=True)
    return steps


def beside_peer(args: argparse.Namespace, work: Work, folder: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Let ours and the peer take steps in turn."""
    python = args.peer_python or peer_environment()
    theirs = replaced(work, args.peer_args)
    theirs.micro_batch = args.peer_micro_batch or work.micro_batch
    starts = {
        "ours": lambda: ours(args, work, folder, "ours", {}),
        args.peer: lambda: Contestant(python, "trl_worker.py", theirs, folder, args.peer),
    }
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in starts}
    first: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        held: dict[str, Contestant] = {}
        for name, start in () if args.restart else starts.items():
            held[name] = stack.enter_context(start())
            if args.engine == "vllm":
                _ = held[name].first  # starting, it measures free memory: nobody else may take or give any
        for contestant in held.values():
            contestant.steps(args.warmup)
        for _ in range(args.rounds):
            for name, start in starts.items():
                contestant = held.get(name) or start()
                if args.restart:
                    contestant.steps(args.warmup)
                first[name] = contestant.first
                steps[name] += contestant.steps(args.steps)
                last = steps[name][-1]
                print(f"  {name}: {last['wall']:.2f} s, {last['cpu']:.2f} CPU s, {said(last)}", flush=True)
                keep(args, steps.items())
                if args.restart:
                    contestant.close()
    compare(first, args.peer)
    for what in ("wall", "cpu"):
        rates = {n: statistics.median(s["samples"] / s[what] for s in made) for n, made in steps.items()}
        print(f"samples a {what} second: ours / {args.peer} = {rates['ours'] / rates[args.peer]:.2f}")
    return list(steps.items())


def compare(first: dict[str, dict[str, Any]], peer: str) -> None:
    a, b = first["ours"], first[peer]
    loss, norm = a["loss"] - b["loss"], a["grad_norm"] / b["grad_norm"] - 1 if b["grad_norm"] else float("nan")
    print(
        f"on the same samples: ours {said(a)}; {peer} {said(b)}: loss {loss:+.1e}, gradient norm {norm:+.1e} relative"
    )


def said(step: dict[str, Any]) -> str:
    return (
        f"loss {step['loss']:.6f}, gradient norm {step['grad_norm']:.5f}, {step['tokens']} tokens of "
        f"{step['samples']} samples, reward {step['reward']:.3f}"
    )


def replaced(work: Work, settings: dict[str, Any]) -> Work:
    import copy

    made = copy.deepcopy(work)
    made.settings = settings
    return made


def peer_environment() -> str:
    """Give the Python of .venv-trl, which is made first if it is not there: that takes minutes, once."""
    import torch

    python = ROOT / ".venv-trl" / "bin" / "python"
    if not python.exists():
        print(f"making {python.parents[1]}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        version = torch.__version__.split("+")[0]
        extra = ["vllm"] if torch.cuda.is_available() else []
        subprocess.run([str(python), "-m", "pip", "install", "-q", f"torch=={version}", TRL, *extra], check=True)
    return str(python)


# ------------------------------------------------------------------------------------------------ the table


def print_table(rows: Iterable[tuple[str, list[dict[str, Any]]]], work: Work, args: argparse.Namespace) -> None:
    import torch

    cuda = torch.cuda.is_available()
    unit, place = ("wall", 0) if cuda else ("CPU", 1)
    peak = args.peak_tflops or (card_peak(torch.cuda.get_device_name()) if cuda else None)
    head = ["", "samples/s", "tokens/s", "wall s", "CPU s", *PHASES, "rest", "peak GiB", "learner GiB", "TFLOP/s"] + [
        "MFU"
    ] * bool(peak)
    print(f"\nmedians; seconds a phase are {unit} seconds; TFLOP/s of forward and backward")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, steps in rows:
        middle = {
            key: statistics.median(s[key] for s in steps)
            for key in ("wall", "cpu", "samples", "tokens", "peak_gib", "engine_gib")
        }
        phases = {p: statistics.median(s["phases"].get(p, [0.0, 0.0])[place] for s in steps) for p in PHASES}
        rest = middle["wall" if cuda else "cpu"] - sum(phases.values())
        shared = name not in ("no shared prompts", args.peer)
        flops = statistics.median(learner_flops(work, s, shared=shared) for s in steps)
        tflops = flops / max(1e-9, phases["forward"] + phases["backward"]) / 1e12 / args.devices
        cells = [
            name,
            f"{middle['samples'] / middle['wall']:.3g}",
            f"{middle['tokens'] / middle['wall']:.4g}",
            *(f"{middle[k]:.2f}" for k in ("wall", "cpu")),
            *(f"{phases[p]:.2f}" for p in PHASES),
            f"{rest:.2f}",
            f"{middle['peak_gib']:.2f}",
            f"{middle['peak_gib'] - middle['engine_gib']:.2f}",
            f"{tflops:.3g}",
        ] + ([f"{tflops / peak:.1%}"] if peak else [])
        print("| " + " | ".join(cells) + " |", flush=True)


def card_peak(name: str) -> float | None:
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in name), None)


def learner_flops(work: Work, step: dict[str, Any], *, shared: bool) -> float:
    """Count the operations of products with weights in forward and backward: 6 a weight and token.

    Padding and attention are left out, prompts count as often as they go through the model; the output head sees
    completion tokens alone.
    """
    c = json.loads((Path(work.model) / "config.json").read_text())
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    size = c.get("head_dim") or hidden // heads
    attention = 2 * hidden * size * (heads + c.get("num_key_value_heads", heads))
    body = c["num_hidden_layers"] * (attention + 3 * hidden * c["intermediate_size"])
    tokens = step["tokens"] + step["prompt_tokens"] * (1 if shared else work.group_size)
    return 6.0 * (body * tokens + hidden * c["vocab_size"] * step["tokens"])


def describe(args: argparse.Namespace, work: Work) -> str:
    import platform

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    length = "up to" if args.natural_length else "exactly"
    return (
        f"{args.shape or Path(args.model).name}, {args.dtype}, {args.prompts} prompts x {args.group_size} completions "
        f"of {length} {args.max_new_tokens} tokens, rewards: {args.rewards}, {args.engine} engine, "
        f"{args.threads} thread(s), {args.devices} x {device}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    sys.exit(main())
