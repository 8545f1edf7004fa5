"""Objectives: every method as one composition of orthogonal parts. Imports torch only.

``Objective.from_recipe("dapo", clip_high=0.3)`` from Python, ``objective: {recipe: dapo, clip_high: 0.3}`` in YAML.
"""

from lit_grpo.objectives.config import ObjectiveConfig
from lit_grpo.objectives.objective import Objective, StepPlan
from lit_grpo.objectives.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Objective", "ObjectiveConfig", "Recipe", "StepPlan"]
