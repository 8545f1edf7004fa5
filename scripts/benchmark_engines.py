#!/usr/bin/env python3
"""Tokens a second of ``data.engine.processes`` 1, 2, 3, 4 on one card, and what a sync of the weights takes.

    python scripts/benchmark_engines.py models/SmolLM2-135M-Instruct
    python scripts/benchmark_engines.py MODEL --processes 1 2 --async default on off --rounds 5
    python scripts/benchmark_engines.py MODEL --sync              # ms of a sync, and that the weights are the policy's
    python scripts/benchmark_engines.py MODEL --kill              # seconds until a process that died is back
    python scripts/benchmark_engines.py MODEL --overlap           # generation and other work of this process at once
    python scripts/benchmark_engines.py MODEL --same              # completions that equal those of one process

Every setting has a process of its own and starts afresh; settings follow one another, in one run on one machine. A
round is one call of the engine's ``generate`` as a run makes it: ``--prompts`` groups of ``--samples`` with their
log-probabilities, temperature 1, every completion read. Without ``--data`` prompts are random tokens and every
completion has exactly ``--tokens``; with a JSON-lines file (``--key`` names the text) they end as they end.

Needs the repository root as working folder or in PYTHONPATH, and nothing that is not installed with vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lit_grpo.types import Request, Sampling

MARK = "benchmark_engines: "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--async", dest="scheduling", nargs="+", default=["on", "off"],
                        choices=["default", "on", "off"], help="vLLM's async_scheduling")  # fmt: skip
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=112)
    parser.add_argument("--tokens", type=int, default=256, help="of each completion, at most where --data is given")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--data", help="JSON lines with prompts, read with the model folder's tokenizer")
    parser.add_argument("--key", default="question", help="key of the text in --data")
    parser.add_argument("--dtype", default="", help="of the engines; bfloat16 on a card, else float32")
    parser.add_argument("--learner-dtype", default="float32", help="of the policy in --sync and --kill")
    parser.add_argument("--memory", type=float, default=0.6, help="gpu_memory_utilization, of all processes together")
    parser.add_argument("--cache-gib", type=float, default=0, help="key-value cache of all together; 0: vLLM measures")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further vLLM engine arguments, as JSON")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--sync", dest="mode", action="store_const", const="sync", default="rate")
    mode.add_argument("--kill", dest="mode", action="store_const", const="kill")
    mode.add_argument("--overlap", dest="mode", action="store_const", const="overlap")
    mode.add_argument("--same", dest="mode", action="store_const", const="same")
    parser.add_argument("--own", action="store_true", help="a process of its own where it is the only one, too")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(MARK + json.dumps(MODES[args.mode](args, **args.one)), flush=True)
        return 0
    print(f"{place()}; {args.model}; {args.prompts} x {args.samples} x {args.tokens} tokens", flush=True)
    rows = []
    scheduling = args.scheduling if args.mode == "rate" else args.scheduling[:1]
    # Round robin over the numbers, so that a card that slows down slows all of them.
    for how in scheduling:
        for processes in args.processes:
            if args.mode == "kill" and processes < 2:
                continue
            row = measure(["--one", json.dumps({"processes": processes, "scheduling": how})])
            rows.append({"processes": processes, "async": how, **row})
            print("  " + "  ".join(f"{key} {shown(value)}" for key, value in rows[-1].items()), flush=True)
    table(rows)
    return 0


def measure(more: list[str]) -> dict[str, Any]:
    """Run one setting in a process of its own, and return what it prints, or its error."""
    run = subprocess.run([sys.executable, __file__, *sys.argv[1:], *more], capture_output=True, text=True, check=False)
    for line in run.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))  # type: ignore[no-any-return,unused-ignore]
    return {"error": (run.stderr or run.stdout).strip()[-1500:]}


def rate(args: argparse.Namespace, processes: int, scheduling: str) -> dict[str, Any]:
    """Return tokens a second of each round."""
    requests, ends = make_requests(args)
    engine, start = build(args, processes, scheduling, end_token_ids=ends)
    sampling = Sampling(max_new_tokens=args.tokens)
    rates, lengths = [], []
    for round_ in range(args.rounds + 1):
        began = time.perf_counter()
        completions = list(engine.generate(requests, sampling))
        seconds = time.perf_counter() - began
        assert len(completions) == args.prompts * args.samples
        tokens = sum(len(c.token_ids) for c in completions)
        assert all(len(c.logprobs) == len(c.token_ids) for c in completions)
        if round_:
            rates.append(tokens / seconds)
            lengths.append(tokens / len(completions))
    engine.close()
    return {"start_s": start, "tokens/s": statistics.median(rates), "min": min(rates), "max": max(rates),
            "mean_length": statistics.mean(lengths)}  # fmt: skip


def sync(args: argparse.Namespace, processes: int, scheduling: str) -> dict[str, Any]:
    """Return milliseconds of a sync, and how far the engine's log-probabilities are from the policy's afterwards."""
    import torch

    model, requests = load_policy(args), make_requests(args)[0]
    engine, start = build(args, processes, scheduling, load_format="dummy", policy_model=model)
    times = []
    for version in range(args.rounds + 2):
        with torch.no_grad():
            # Other weights each time: an engine that kept the old ones would show below.
            for parameter in model.parameters():
                parameter.mul_(1.01 if version % 2 else 1 / 1.01)
        synchronize()
        began = time.perf_counter()
        engine.sync(model.named_parameters(), version)
        times.append(1000 * (time.perf_counter() - began))
    gap = mean_gap(model, engine, requests[: max(4, processes)], Sampling(max_new_tokens=16))
    engine.close()
    return {"start_s": start, "sync_ms": statistics.median(times[2:]), "first_ms": times[0], "max_ms": max(times[2:]),
            "gap_nats": gap}  # fmt: skip


def kill(args: argparse.Namespace, processes: int, scheduling: str) -> dict[str, Any]:
    """Return seconds until a killed process is back with the same weights, from the policy and from a twin."""
    import torch

    result: dict[str, Any] = {}
    model = load_policy(args)
    requests, sampling = make_requests(args)[0], Sampling(max_new_tokens=args.tokens)
    ways = {"policy": model.named_parameters, "twin": None} if torch.cuda.is_available() else {"files": None}
    for way, current in ways.items():
        options = {"load_format": "dummy", "policy_model": model, "current_weights": current}
        engine, _ = build(args, processes, scheduling, **options)
        engine.sync(model.named_parameters(), 7)
        list(engine.generate(requests, sampling))
        began = time.perf_counter()
        undisturbed = {(c.request, c.sample): c.token_ids for c in engine.generate(requests, sampling)}
        whole = time.perf_counter() - began
        victim = workers_of(os.getpid())[0]
        began = time.perf_counter()
        running = engine.generate(requests, sampling)
        threading.Timer(whole / 4, os.kill, (victim, signal.SIGKILL)).start()
        again = {(c.request, c.sample): c.token_ids for c in running}
        result[f"{way}_s"] = time.perf_counter() - began - whole
        result[f"{way}_same"] = sum(again[key] == ids for key, ids in undisturbed.items()) / len(undisturbed)
        result[f"{way}_gap"] = mean_gap(model, engine, requests[: 2 * processes], Sampling(max_new_tokens=16))
        engine.close()
    return result


def overlap(args: argparse.Namespace, processes: int, scheduling: str) -> dict[str, Any]:
    """Return seconds of a generation, of Python work in this process, and of both at once."""
    requests, ends = make_requests(args)
    engine, _ = build(args, processes, scheduling, end_token_ids=ends)
    sampling = Sampling(max_new_tokens=args.tokens)
    generate_all = lambda: list(engine.generate(requests, sampling))  # noqa: E731
    generate_all()
    alone = clock(generate_all)
    # As long a work of pure Python as a generation is: it and an engine in this process would take turns.
    count = int(1e6 * alone / clock(lambda: busy(10**6)))
    work = clock(lambda: busy(count))
    thread = threading.Thread(target=generate_all)

    def both() -> None:
        thread.start()
        busy(count)
        thread.join()

    together = clock(both)
    engine.close()
    return {"generate_s": alone, "work_s": work, "together_s": together, "over_longer": together / max(alone, work)}


def same(args: argparse.Namespace, processes: int, scheduling: str) -> dict[str, Any]:
    """Return which share of the completions is the same as from one engine in this process."""
    requests, ends = make_requests(args)
    sampling = Sampling(max_new_tokens=args.tokens)
    found = []
    for number in (1, processes):
        engine, _ = build(args, number, scheduling, end_token_ids=ends)
        found.append({(c.request, c.sample): c for c in engine.generate(requests, sampling)})
        engine.close()
    pairs = [(c, found[1][key]) for key, c in found[0].items()]
    alike = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
    firsts = [next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
              for a, b in pairs]  # fmt: skip
    gaps = [abs(x - y) for a, b in alike for x, y in zip(a.logprobs, b.logprobs, strict=True)]
    return {"completions": len(pairs), "same": len(alike), "same_to_the_bit": sum(a == b for a, b in alike),
            "mean_first_difference": statistics.mean([i for i in firsts if i is not None] or [0]),
            "largest_gap_nats": max(gaps, default=0.0), "mean_gap_nats": statistics.mean(gaps or [0.0])}  # fmt: skip


MODES = {"same": same, "rate": rate, "sync": sync, "kill": kill, "overlap": overlap}


def busy(count: int) -> int:
    total = 0
    for i in range(count):
        total += i & 3
    return total


def clock(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def build(args: argparse.Namespace, processes: int, scheduling: str, **more: Any) -> tuple[Any, float]:
    """Return an engine and the seconds that its start took."""
    import torch

    from lit_grpo.engines.vllm.engine import VLLMEngine
    from lit_grpo.engines.vllm_processes.engine import VLLMProcesses

    options: dict[str, Any] = {
        "end_token_ids": (),
        "dtype": args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32"),
        "max_model_len": args.prompt_tokens + args.tokens + 16,
        "max_num_seqs": args.prompts * args.samples,
        "gpu_memory_utilization": args.memory,
        **({"kv_cache_memory_bytes": int(args.cache_gib * 2**30)} if args.cache_gib else {}),
        **({} if scheduling == "default" else {"async_scheduling": scheduling == "on"}),
        **args.engine_args,
        **more,
    }
    if not torch.cuda.is_available():
        # vLLM's CPU build switches it off in any case, and refuses nothing.
        options.pop("async_scheduling", None)
    began = time.perf_counter()
    if processes == 1 and not args.own:
        options.pop("current_weights", None)
        return VLLMEngine(args.model, **options), time.perf_counter() - began
    return VLLMProcesses(args.model, processes=processes, **options), time.perf_counter() - began


def load_policy(args: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.learner_dtype))
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False)


def mean_gap(model: Any, engine: Any, requests: list[Request], sampling: Sampling) -> float:
    """Return the mean difference in nats of the engine's log-probabilities from the model's own."""
    import torch

    prompts = {request.index: request.token_ids for request in requests}
    total, count = 0.0, 0
    for c in engine.generate(requests, sampling):
        prompt = prompts[c.request]
        ids = torch.tensor([[*prompt, *c.token_ids]], device=model.device)
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        total, count = total + float((expected - torch.tensor(c.logprobs)).abs().sum()), count + len(c.token_ids)
    return total / count


def make_requests(args: argparse.Namespace) -> tuple[list[Request], tuple[int, ...]]:
    """Return the requests, and the tokens that end a completion."""
    config = json.loads((Path(args.model) / "config.json").read_text())
    ends: tuple[int, ...] = ()
    if args.data:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
        lines = Path(args.data).read_text(encoding="utf-8").splitlines()[: args.prompts]
        prompts = [tuple(tokenizer(json.loads(line)[args.key])["input_ids"])[: args.prompt_tokens] for line in lines]
        ends = (tokenizer.eos_token_id,)
    else:
        draw = random.Random(0)
        top = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
        prompts = [
            tuple(draw.randrange(top // 40, top) for _ in range(args.prompt_tokens)) for _ in range(args.prompts)
        ]
    samples = range(args.samples)
    return [Request(i, prompt, tuple(1000 * i + s for s in samples)) for i, prompt in enumerate(prompts)], ends


def workers_of(parent: int) -> list[int]:
    """Return the engine processes below a process, which are children of its supervisors."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return sorted(worker for supervisor in children.get(parent, []) for worker in children.get(supervisor, []))


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def place() -> str:
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    return f"{card}, torch {torch.__version__}, Python {platform.python_version()}"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)


def table(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a Markdown table; the rate beside that of the first row that has one."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != "error"))
    base = next((row["tokens/s"] for row in rows if "tokens/s" in row), None)
    print("\n| " + " | ".join(columns + (["times"] if base else [])) + " |")
    print("|" + "---|" * (len(columns) + bool(base)))
    for row in rows:
        cells = [shown(row.get(column, "")) for column in columns]
        cells += [f"{row['tokens/s'] / base:.2f}" if "tokens/s" in row else ""] if base else []
        print("| " + " | ".join(cells) + " |")
    for row in rows:
        if "error" in row:
            print(f"\n{row['processes']} processes, async {row['async']} failed:\n{row['error']}")


if __name__ == "__main__":
    sys.exit(main())
