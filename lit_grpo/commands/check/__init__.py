"""``lit-grpo check``: what can be known of a run before GPU hours are spent on it."""
