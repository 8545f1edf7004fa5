"""``lit-grpo filter``: pass rates of all training prompts, and those prompts that are of the wanted difficulty."""
