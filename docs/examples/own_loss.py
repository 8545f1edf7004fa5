"""A loss of your own: an advantage and a trust region as two functions, everything else as in a recipe.

    python docs/examples/own_loss.py

On the command line the same is ``--model.objective.custom_advantage=own_loss.leave_one_out`` (an import path).
"""

import lightning.pytorch as pl
import torch

from lit_grpo import LitGRPO, RolloutDataModule
from lit_grpo.data import AdditionPrompts
from lit_grpo.objectives import ObjectiveConfig
from lit_grpo.objectives.advantages import AdvantageInputs
from lit_grpo.objectives.trust_regions import SurrogateInputs
from lit_grpo.policy import PolicyConfig, TinyModel
from lit_grpo.rewards import ExactMatch
from lit_grpo.types import Sampling


def leave_one_out(inputs: AdvantageInputs) -> torch.Tensor:
    """Compare each completion with the mean of the others of its group, [N]: RLOO's baseline (2402.14740)."""
    groups = inputs.groups
    size = groups.spread(groups.size)
    return (inputs.rewards - groups.spread(groups.mean(inputs.rewards))) * size / (size - 1)


def smooth_clip(inputs: SurrogateInputs) -> torch.Tensor:
    """Bound the ratio smoothly, [n, T]: tanh in the place of a clip, so that no token loses its whole gradient."""
    return (1 + 0.2 * torch.tanh((inputs.ratio - 1) / 0.2)) * inputs.advantages


def main(rollouts: int = 3) -> LitGRPO:
    """Train with both, two updates on each rollout so that the ratio leaves 1."""
    pl.seed_everything(0)
    parts = {"custom_advantage": f"{__name__}.leave_one_out", "custom_trust_region": f"{__name__}.smooth_clip"}
    own = ObjectiveConfig(recipe="grpo", **parts)
    module = LitGRPO(policy=PolicyConfig(tiny=TinyModel()), objective=own, updates_per_rollout=2)
    data = RolloutDataModule(
        AdditionPrompts(digits=1), [ExactMatch()], group_size=8, rollouts=rollouts, sampling=Sampling(max_new_tokens=3)
    )
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module, datamodule=data)
    print(module.objective.name, module.optimizer_steps, "steps")
    return module


if __name__ == "__main__":
    main()
