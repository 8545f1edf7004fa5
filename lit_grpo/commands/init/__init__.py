"""``lit-grpo init``: a project of five files that trains at once."""
