"""``lit-grpo check``: the preflight, one module for each subject that it looks at."""
