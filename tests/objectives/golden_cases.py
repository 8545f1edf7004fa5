"""Golden cases as calls of the public API: method and configuration keys become a recipe and overrides."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_grpo.objectives import Objective
from lit_grpo.objectives.state import ObjectiveState, PromptHistory
from lit_grpo.types import Experience
from tests.paths import SHARED

DEFAULT = SHARED / "golden" / "objectives.json"
PATH = Path(os.environ.get("GOLDEN_OBJECTIVES", DEFAULT))

RECIPE_OF = {
    "REINFORCE": "reinforce", "REINFORCE b*": "reinforce_bstar", "REINFORCE b* (OPO)": "reinforce_bstar",
    "RLOO": "rloo", "REINFORCE++": "reinforce_pp", "REINFORCE++-baseline": "reinforce_pp_baseline", "PPO": "ppo",
    "TRPO": "trpo_penalty", "TRPO (penalised)": "trpo_penalty", "GRPO": "grpo", "GRPO (token norm.)": "grpo",
    "IMLE": "imle", "RAFT": "raft", "RAFT++": "raft_pp", "Reinforce-Rej": "reinforce_rej", "Dr.GRPO": "dr_grpo",
    "DAPO": "dapo", "LitePPO": "lite_ppo", "GSPO": "gspo", "GSPO-token": "gspo_token", "GMPO": "gmpo",
    "CISPO": "cispo", "SAPO": "sapo", "DCPO": "dcpo", "Lopti": "lopti", "AR": "advantage_reweighting", "RSPO": "rspo",
    "VAPO": "vapo", "GTPO": "gtpo", "Olmo-3 recipe": "olmo3", "Olmo-3": "olmo3", "RENT": "rent",
    "W-REINFORCE": "w_reinforce", "PSR": "psr", "NSR": "nsr",
}  # fmt: skip
LIKELIHOOD = {"PL", "NL", "CL", "TNPL", "TNNL", "TNCL"}

# What a recipe switches on beyond the plain formula; the cases name each of these when they want it.
SWITCHES: dict[str, dict[str, Any]] = {
    "dapo": {"dynamic_sampling": False, "reward_map": "raw", "overlong_penalty": False},
    "dr_grpo": {"truncated_reward": "keep"},
    "olmo3": {"dynamic_sampling": False, "sampler_correction": "none"},
    "ppo": {"whiten": False},
}
SCALE = {"group": "group_std", "batch": "batch_std", "none": "group_mean", "group_var": "group_var"}
RATIO = {"old": "token", "self": "self", "none": "none", "seq_product": "sequence_product"}
SAMPLER = {
    "none": "none", "token_tis": "tis_token", "seq_tis": "tis_sequence", "token_mis": "mis_token",
    "seq_mis": "mis_sequence", "geo_mask": "geo_mask", "geo_mask_token_tis": "geo_mask_tis_token",
}  # fmt: skip
FORM = {"sequence": "sequence", "token": "sequence_token"}
WITH_STD = {"group_std", "batch_std", "group_var"}
WITH_EMPTY = {"seq_mean", "sum_const", "seq_sum", "per_prompt_set", "per_prompt_set_const"}
SAME = (
    "baseline", "std_ddof", "std_eps", "single_sample_advantage", "max_tokens", "drop_zero_variance", "mask_truncated",
    "top_entropy", "router_floor", "router_stage", "whiten", "whiten_ddof",
)  # fmt: skip
RENAMED = {
    "eps_low": "clip_low", "eps_high": "clip_high", "dual": "dual_clip", "lam": "gae_lambda", "T_const": "max_tokens",
    "weight": "optimal_baseline_weights", "neg_reward": "negative_weight", "r_max": "dual_clip",
    "tau_pos": "sapo_tau_pos", "tau_neg": "sapo_tau_neg", "eps_log": "log_clip", "cap": "cispo_cap",
    "floor": "cispo_floor",
    "value_clip": "value_clip", "mu": "nll_coef", "threshold": "entropy_threshold", "H_init": "initial_entropy",
    "overlap": "conflict_overlap", "entropy_base": "invalid_entropy", "lambda_pos": "positive_weight",
    "lam_pos": "positive_weight", "L_max": "overlong_max", "L_cache": "overlong_cache",
}  # fmt: skip
# Keys that are handled by hand below, or that say nothing beyond the method's name.
BY_HAND = {
    "agg", "denom", "scale", "eps", "ratio", "beta", "kl", "beta_reward", "tis", "tis_cap", "tis_floor", "tis_overlay",
    "which", "norm", "denominator", "plusplus", "form", "visit", "history", "pass", "eta", "alpha", "gamma",
    "group_baseline", "invalid", "pool",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One golden case, ready to run."""

    name: str
    objective: Objective
    config: dict[str, Any]
    inputs: dict[str, Any]
    expected: dict[str, Any]
    pass_index: int

    def tensor(self, key: str, dtype: torch.dtype) -> Tensor | None:
        """An input, or None."""
        value = self.inputs.get(key)
        return None if value is None else torch.tensor(_unknown_as_nan(value), dtype=dtype)

    def experience(self, dtype: torch.dtype) -> Experience:
        """The case's inputs as the trainer would hand them over."""
        i = self.inputs
        invalid = self.config.get("invalid")
        return Experience(
            lengths=torch.tensor(i["lengths"]),
            group_ids=torch.tensor(i["group_ids"]),
            rewards=torch.tensor(i["rewards"], dtype=dtype),
            truncated=torch.tensor(i["truncated"]),
            width=i["T"],
            token_ids=torch.tensor(i["token_ids"]),
            old_logprobs=self.tensor("old_logp", dtype),
            sampler_logprobs=self.tensor("sampler_logp", dtype),
            ref_logprobs=self.tensor("ref_logp", dtype),
            entropy=self.tensor("entropy", dtype),
            values=self.tensor("values", dtype),
            sum_squared_probs=self.tensor("sum_pi_sq", dtype),
            score_sqnorm=self.tensor("score_sqnorm", dtype),
            router_logscores_old=_padded(i.get("router_logscore_old"), i["T"], dtype),
            invalid=None if invalid is None else torch.tensor(invalid),
            prompt_ids=[str(g) for g in i["group_ids"]],
        )

    def router(self, dtype: torch.dtype) -> Tensor | None:
        """Log-scores of the current routers, [N, T, layers, K]."""
        return _padded(self.inputs.get("router_logscore_new"), self.inputs["T"], dtype)

    def state(self) -> ObjectiveState:
        """The run's state before the case: DCPO's history."""
        visits = float(self.config.get("visit", 1) - 1)
        history = self.config.get("history", {})
        prompts = {group: PromptHistory(mean, std, visits) for group, (mean, std) in history.items()}
        return replace(self.objective.new_state(), prompts=prompts)


def _unknown_as_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_unknown_as_nan(item) for item in value]
    return float("nan") if value is None else value


def _padded(rows: Any, width: int, dtype: torch.dtype) -> Tensor | None:
    if rows is None:
        return None
    some = next(cell for row in rows for cell in row)
    blank = torch.full_like(torch.tensor(some, dtype=dtype), 9.99).tolist()
    return torch.tensor([list(row) + [blank] * (width - len(row)) for row in rows], dtype=dtype)


def recipe_name(method: str, config: dict[str, Any]) -> str:
    """``GRPO + TIS`` -> grpo; ``PL`` with a token norm -> tnpl; ``PSR`` by ``which``."""
    base = method.split(" + ")[0].removesuffix(" edge").strip()
    if base.startswith("KL ") and base.endswith(" in loss"):
        return "grpo"
    if base in LIKELIHOOD:
        name = str(config.get("which", base.removeprefix("TN"))).lower()
        return f"tn{name}" if config.get("norm") == "token" or base.startswith("TN") else name
    if "which" in config:
        return {"PSR": "psr", "NSR": "nsr", "W": "w_reinforce", "W-REINFORCE": "w_reinforce"}[config["which"]]
    if base.startswith("RAFT"):
        return "raft_pp" if config.get("plusplus", base == "RAFT++") else "raft"
    if base == "REINFORCE++" and config.get("group_baseline"):
        return "reinforce_pp_baseline"
    return RECIPE_OF[base]


def overrides(recipe: str, method: str, config: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    """The configuration as overrides of the recipe."""
    start = Objective.from_recipe(recipe)
    out: dict[str, Any] = {"kl_coef": 0.0, "entropy_coef": 0.0} | SWITCHES.get(recipe, {})
    out |= {k: config[k] for k in SAME if k in config}
    out |= {new: config[old] for old, new in RENAMED.items() if old in config}
    unknown = set(config) - set(SAME) - set(RENAMED) - BY_HAND
    assert not unknown, f"unknown configuration keys {unknown}"

    if method.startswith("KL "):  # the KL term alone: no reward, no policy term
        alone = {"advantage": "raw", "aggregation": config["agg"], "kl_coef": config.get("beta", 1.0),
                 "kl_estimator": config["kl"], "max_tokens": config.get("max_tokens"),
                 "count_empty": config.get("denom") == "all"}  # fmt: skip
        return _meaningful(recipe, alone)
    if "eps" in config:
        out |= {"clip_low": config["eps"], "clip_high": config["eps"]} if config["eps"] is not None else {
            "trust_region": "none"
        }  # fmt: skip
    if "ratio" in config:
        out["ratio"] = RATIO[config["ratio"]]
        if out["ratio"] == "none":
            out["trust_region"] = "none"
    if "form" in config:
        out["ratio"] = FORM[config["form"]]
    if "agg" in config:
        out["aggregation"] = config["agg"]
    aggregation = out.get("aggregation", start.aggregation.kind)
    if "pool" in config:
        out["set_scope"] = "batch" if config["pool"] == "batch" else "prompt"
    if not aggregation.endswith("const"):
        out.pop("max_tokens", None)
    if "scale" in config:
        out["advantage"] = SCALE[config["scale"]]
    if "denom" in config and aggregation in WITH_EMPTY:
        out["count_empty"] = config["denom"] == "all"
    elif recipe == "grpo" and aggregation == "sum_const":
        out["count_empty"] = False
    if out.get("advantage", start.advantage.kind) not in WITH_STD:
        out = {k: v for k, v in out.items() if k not in ("std_ddof", "std_eps")}

    # Clip keys of an objective that has no clip (ratio none) say nothing.
    if recipe in ("reinforce", "imle", "raft", "reinforce_bstar", "rloo") and out.get("ratio", start.ratio) == "none":
        out = {k: v for k, v in out.items() if k not in ("clip_low", "clip_high", "dual_clip")}

    if str(config.get("weight", "")).startswith("token"):
        out["optimal_baseline_weights"] = "token_level"
    out |= _regularisers(recipe, config, inputs)
    out |= _sampler(config)
    out |= _filters(recipe, config)
    out |= _method(recipe, config)
    return _meaningful(recipe, out)


def _meaningful(recipe: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Without the numbers of parts that the method does not have: a configuration may name more than it uses."""
    structure = {k: v for k, v in changes.items() if k in ("advantage", "ratio", "trust_region", "aggregation")}
    structure |= {k: v for k, v in changes.items() if k == "sampler_correction"}
    if structure.get("advantage", "gae").startswith("gae"):
        structure |= {k: v for k, v in changes.items() if k == "value_coef"}
    else:
        structure["value_coef"] = changes["value_coef"] = 0.0
    known = Objective.from_recipe(recipe, **structure).describe()
    return {k: v for k, v in changes.items() if k in known}


def _regularisers(recipe: str, config: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    beta = config.get("beta_reward", config.get("beta", 0.0))
    if recipe == "trpo_penalty":
        out["trpo_beta"] = beta
        beta = config.get("beta_reward", 0.0)
    if beta:
        out["kl_coef"] = beta
        in_reward = recipe in ("rloo", "reinforce_pp", "reinforce_pp_baseline") or "beta_reward" in config
        out["kl_placement"] = "reward" if in_reward else "loss"
        if not in_reward:
            out["kl_estimator"] = config.get("kl", "k3")
    if recipe in ("ppo", "trpo_penalty", "vapo"):
        out["value_coef"] = 1.0 if "values_new" in inputs else 0.0
    return out


def _sampler(config: dict[str, Any]) -> dict[str, Any]:
    overlay = config.get("tis_overlay") or {}
    mode, cap, floor = (
        overlay.get("mode", config.get("tis")),
        overlay.get("cap", config.get("tis_cap")),
        overlay.get("floor", config.get("tis_floor")),
    )
    if mode is None:
        return {}
    kind = SAMPLER[mode]
    out: dict[str, Any] = {"sampler_correction": kind}
    if kind.startswith("geo_mask"):
        bounds = cap if isinstance(cap, list) else [cap]
        out |= {"geo_high": bounds[0], "geo_low": floor}
        if kind == "geo_mask_tis_token" and len(bounds) > 1:
            out["sampler_cap"] = bounds[1]
    elif kind != "none":
        out |= {"sampler_cap": cap, "sampler_floor": floor}
    return {k: v for k, v in out.items() if v is not None}


def _filters(recipe: str, config: dict[str, Any]) -> dict[str, Any]:
    denominator = config.get("denominator")
    if denominator is None:
        return {}
    if recipe in ("raft", "raft_pp"):  # all tokens: the others count, with advantage 0
        return {"keep_sign": "positives"} if denominator.startswith("kept") else {}
    return {"filtered_denominator": "kept" if denominator.startswith("kept") else "all"}


def _method(recipe: str, config: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if "L_max" in config:
        out |= {"reward_map": "signed", "overlong_penalty": True}
    if recipe in ("ppo", "trpo_penalty", "vapo") and "gamma" in config:
        out["gae_gamma"] = config["gamma"]
    if recipe == "gtpo":
        out["entropy_gamma"] = config["gamma"]
        if config.get("norm") == "code":
            out["aggregation"] = "conflict_tokens"
    if recipe == "vapo" and "alpha" in config:
        out["length_alpha"] = config["alpha"]
    if recipe in ("lopti", "advantage_reweighting"):
        out["reweight_alpha"] = config.get("alpha", 0.0)
        out["lopti_eta"] = config.get("eta", 0.5) if config.get("pass") in ("low", "high") else 0.0
    return out


def load(path: Path = PATH) -> dict[str, Any]:
    """The whole file."""
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def cases(path: Path = PATH) -> list[dict[str, Any]]:
    """The raw cases of a file, none if it is absent."""
    return list(load(path)["cases"]) if path.exists() else []


def make(raw: dict[str, Any]) -> Case:
    """A raw case with its objective."""
    config, method = dict(raw["config"]), raw["method"]
    recipe = recipe_name(method, config)
    inputs = dict(raw["inputs"])
    changed = overrides(recipe, method, config, inputs)
    if method.startswith("KL "):
        inputs["rewards"] = [0.0] * len(inputs["rewards"])
    objective = Objective.from_recipe(recipe, **changed)
    return Case(raw["name"], objective, config, inputs, raw["expected"], int(config.get("pass") == "high"))
