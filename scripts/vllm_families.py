"""What vLLM serves of each family of models, tried on tiny random ones: exact, refused, or wrong.

    python scripts/vllm_families.py                  # all families, into docs/rollouts.md; some 15 minutes on 2 cores
    python scripts/vllm_families.py llama smollm3    # these alone, to the terminal

Each family has a process of its own. The model is made from transformers' configuration with random weights, and
``VLLMEngine`` serves it as a run does, except that it reads the weights from disk first. Then

1. vLLM's log-probabilities of what it sampled are compared with transformers' own forward pass (loaded);
2. the learner's model must give the numbers that it gave before vLLM was in the process, to the bit (learner);
3. the check of a run's first sync is made, under changed weights and again under the first ones (sync);
4. new random weights are synced and compared as in 1 (new weights).

A family that vLLM or the sync refuses with an error, or that the check of the sync names, is ``refused``: a run would
not have spent a rollout. ``wrong`` is what would have gone on with other numbers than the learner's, and is to be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "rollouts.md"
BEGIN, END = "<!-- vllm families: begin -->", "<!-- vllm families: end -->"
SECONDS = 240
VOCABULARY = 256
# Prompts are longer than every window, convolution and chunk below.
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "initializer_range": 0.12,
}  # fmt: skip
LEFT_OUT = object()
"""Value of an argument that a configuration computes itself."""
MHA = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOW = {"sliding_window": 16}
LATENT = {
    # vLLM's kernels know DeepSeek's own sizes alone.
    **{"head_dim": LEFT_OUT, "num_key_value_heads": 2, "q_lora_rank": None, "kv_lora_rank": 512},
    **{
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
    },
    **{
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Classes of vLLM's own.
    "llama": ("Llama", {}),
    "mistral": ("Mistral", WINDOW),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", WINDOW),
    "gemma3": ("Gemma3", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {}),
    "glm4": ("Glm4", {}),
    "cohere": ("Cohere", {}),
    "exaone4": ("Exaone4", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "stablelm": ("StableLm", MHA),
    "nemotron": ("Nemotron", {}),
    "gpt2": ("GPT2", {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2}),
    "gptj": ("GPTJ", {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16}),
    "opt": ("OPT", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "falcon": ("Falcon", {"head_dim": LEFT_OUT, "new_decoder_architecture": False}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 2}),
    # Mixtures of experts.
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "olmoe": ("Olmoe", EXPERTS),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_oss": ("GptOss", WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("Llama4", {"num_local_experts": 2, "intermediate_size_mlp": 128, "attention_chunk_size": 32}),
    "glm4_moe": ("Glm4Moe", EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    # Latent attention.
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v3": ("DeepseekV3", LATENT | {"topk_method": "noaux_tc"}),
    # Convolutions, linear attention, state spaces.
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "mamba": ("Mamba", {"state_size": 16}),
    "mamba2": ("Mamba2", {"head_dim": 32, "num_heads": 4, "n_groups": 1, "state_size": 16}),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False}),
    "qwen3_next": ("Qwen3Next", EXPERTS | {"layer_types": ["linear_attention", "full_attention"]}),
    # Transformers' own classes, inside vLLM.
    "smollm3": ("SmolLM3", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "glm": ("Glm", {}),
    # It has keys for all of its heads, and vLLM would believe the number.
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": LEFT_OUT}),
    "phi": ("Phi", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "seed_oss": ("SeedOss", {}),
    "arcee": ("Arcee", {}),
}  # fmt: skip
TEXT_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
LM_HEADS = {"GPT2": "GPT2LMHeadModel"}


@dataclass
class Row:
    """What was found of one family."""

    family: str
    verdict: str
    """``exact``, ``refused`` or ``wrong``."""
    served_by: str = ""
    loaded: float | None = None
    """Largest gap (nats) after vLLM loaded the weights."""
    synced: float | None = None
    """Largest gap after another model's weights were synced."""
    learner: str = ""
    """Whether the learner's numbers are what they were before vLLM was in its process."""
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="these alone, to the terminal")
    parser.add_argument("--one", choices=list(FAMILIES), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(asdict(row_of(args.one))))
        return
    rows = []
    for family in args.families or FAMILIES:
        started = time.perf_counter()
        rows.append(in_a_process_of_its_own(family))
        print(f"{time.perf_counter() - started:4.0f} s  {line_of(rows[-1])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    print(counts(rows))
    if not args.families:
        write(rows)
    sys.exit(any(row.verdict == "wrong" for row in rows))


def in_a_process_of_its_own(family: str) -> Row:
    """Return the row of a family; one whose process dies or hangs is wrong, since nothing was refused."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(Path(__file__)), "--one", family]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=environment | {"PYTHONPATH": paths}
        )
    except subprocess.TimeoutExpired:
        return Row(family, "wrong", reason=f"no end after {SECONDS} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines or not lines[-1].startswith("{"):
        end = " ".join(done.stderr.strip().splitlines()[-2:])
        return Row(family, "wrong", reason=f"exit code {done.returncode}: {end[-200:]}")
    return Row(**json.loads(lines[-1]))


# ---------------------------------------------------------------------------------------------------- one family


def make_model(family: str, seed: int = 0) -> Any:
    """Return a tiny float32 model of a family, of random weights whose log-probabilities are far from uniform."""
    import torch
    import transformers

    name, changes = FAMILIES[family]
    known = getattr(transformers, TEXT_CONFIGS.get(name, f"{name}Config"))
    config = known(**{key: value for key, value in (SHAPE | changes).items() if value is not LEFT_OUT})
    torch.manual_seed(seed)
    model = getattr(transformers, LM_HEADS.get(name, f"{name}ForCausalLM"))(config).float().eval()
    spread(model)
    config.architectures = [type(model).__name__]
    return model


def spread(model: Any) -> None:
    """Make weights that transformers begins as equal (norms, biases) differ, so that a swap of two is seen."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def row_of(family: str) -> Row:
    """Try one family in this process."""
    from lit_grpo.errors import EngineError, StopRun, UserError

    row = Row(family, "refused")
    try:
        model = make_model(family)
    except Exception as error:
        return Row(family, "refused", reason=f"transformers itself: {short(error)}")
    try:
        return tried(model, row)
    except (UserError, EngineError, StopRun) as error:
        row.reason = short(error)
        return row


def tried(model: Any, row: Row) -> Row:
    """Serve a model by vLLM, and fill in what is found.

    Raises:
        UserError: vLLM does not take the model.
        EngineError: vLLM does not take the model, its weights, or fails while sampling.
        StopRun: the check of the first sync found that vLLM does not hold the weights that it was given.
    """
    import torch

    from lit_grpo.engines.vllm.engine import VLLMEngine
    from lit_grpo.policy import Policy

    policy = Policy(model)
    before = own_logits(model)
    on_gpu = torch.cuda.is_available()
    cache: dict[str, Any] = {"kv_cache_memory_bytes": 2**26}
    dtype, bound = ("bfloat16", 0.5) if on_gpu else ("float32", 1e-3)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = VLLMEngine(
            folder,
            end_token_ids=(1,),
            dtype=dtype,
            max_model_len=128,
            max_num_seqs=32,
            policy_model=model,
            **cache,
        )
    try:
        row.served_by = served_by(engine)
        row.learner = "as before" if torch.equal(own_logits(model), before) else "changed"
        row.loaded = largest_gap(engine, model)
        check_first_sync(engine, policy, exact=not on_gpu)
        new = make_model(row.family, seed=1)
        model.load_state_dict(new.state_dict())
        engine.sync(policy.named_weights(), 1)
        row.synced = largest_gap(engine, model)
        good = row.loaded <= bound and row.synced <= bound and row.learner == "as before"
        row.verdict = "exact" if good else "wrong"
    finally:
        engine.close()
    return row


def served_by(engine: Any) -> str:
    """Return ``vLLM`` or ``transformers``: whose class of the model runs inside vLLM."""
    name = engine._llm.apply_model(lambda model: type(model).__name__)[0]
    return "transformers" if name.startswith("Transformers") else "vLLM"


def own_logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([prompts()[0]]), use_cache=False).logits


def prompts() -> list[tuple[int, ...]]:
    return [tuple((7 * i + j * j) % (VOCABULARY - 3) + 3 for j in range(40 + 11 * i)) for i in range(3)]


def sample(engine: Any) -> Any:
    """Have the engine sample 16 tokens of 4 completions of each prompt."""
    from lit_grpo.types import Request, Sampling

    asked = [Request(i, prompt, tuple(range(10 * i, 10 * i + 4))) for i, prompt in enumerate(prompts())]
    return sorted(engine.generate(asked, Sampling(max_new_tokens=16)), key=lambda c: (c.request, c.sample))


def logprobs_of(model: Any, completions: Sequence[Any]) -> Iterator[Any]:
    """Yield the log-probabilities of each completion by transformers' own forward pass, one sequence at a time."""
    import torch

    for c in completions:
        prompt = prompts()[c.request]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *c.token_ids]]), use_cache=False).logits
        rows = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        yield rows.gather(1, torch.tensor(c.token_ids)[:, None])[:, 0]


def largest_gap(engine: Any, model: Any) -> float:
    import torch

    completions = sample(engine)
    gaps = [
        float((expected - torch.tensor(c.logprobs)).abs().max())
        for c, expected in zip(completions, logprobs_of(model, completions), strict=True)
    ]
    return max(gaps)


def check_first_sync(engine: Any, policy: Any, *, exact: bool) -> None:
    """Make the check that a run makes of the first sync, against transformers' own forward pass."""
    import torch

    from lit_grpo.learner.engine_agreement import GuardConfig
    from lit_grpo.learner.sync_check import COARSE_ROUNDING, ROUNDING, check_sync
    from lit_grpo.types import Prompt, Rollout

    guards = GuardConfig()
    assert guards.max_sync_gap is not None
    assert guards.max_engine_gap is not None

    def rollout() -> Rollout:
        completions = sample(engine)
        asked = [Prompt(str(i), "", ids) for i, ids in enumerate(prompts())]
        zeros = torch.zeros(len(completions))
        return Rollout(0, asked, completions, [""] * len(completions), {}, zeros, group_size=4)

    def logprobs(found: Rollout) -> Any:
        rows = list(logprobs_of(policy.model, found.completions))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    sync: Callable[[int], object] = lambda version: engine.sync(policy.named_weights(), version)  # noqa: E731
    check_sync(
        policy,
        sync=sync,
        sample=rollout,
        logprobs=logprobs,
        version=0,
        share=guards.max_sync_gap,
        largest_gap=guards.max_engine_gap,
        rounding=ROUNDING if exact else COARSE_ROUNDING,
    )


# ---------------------------------------------------------------------------------------------------- the table


def short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 220 else f"{text[:220]} ..."


def line_of(row: Row) -> str:
    numbers = [
        f"{name} {value:.1e}" for name, value in (("loaded", row.loaded), ("synced", row.synced)) if value is not None
    ]
    return f"{row.verdict:8}{row.family:14}{row.served_by:14}{' '.join(numbers)} {row.learner} {row.reason}"


def counts(rows: Sequence[Row]) -> str:
    verdicts = [row.verdict for row in rows]
    return ", ".join(f"{name}: {verdicts.count(name)}" for name in ("exact", "refused", "wrong"))


def table(rows: Sequence[Row]) -> str:
    import importlib.metadata as metadata

    build = next(name for name in ("vllm", "vllm-cpu") if any(metadata.distributions(name=name)))
    lines = [
        f"Made by `scripts/vllm_families.py` with {build} {metadata.version(build)} and transformers "
        f"{metadata.version('transformers')}: {counts(rows)}.",
        "",
        "| family | model's class | loaded | new weights | learner | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        gaps = ["" if gap is None else f"{gap:.0e}" for gap in (row.loaded, row.synced)]
        said = row.verdict if not row.reason else f"{row.verdict}: {row.reason.replace('|', '/')}"
        lines.append(f"| {row.family} | {row.served_by} | {gaps[0]} | {gaps[1]} | {row.learner} | {said} |")
    return "\n".join(lines)


def write(rows: Sequence[Row]) -> None:
    """Put the table between its markers."""
    text = DOCS.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    DOCS.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{tail}", encoding="utf-8")
    print(f"written to {DOCS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
