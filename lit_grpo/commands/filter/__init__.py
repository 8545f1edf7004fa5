"""``lit-grpo filter``: which prompts a policy solves how often, and those of the difficulty that is wanted."""
