"""The subcommands of ``lit-grpo`` that train nothing: check, filter, export, report, score."""
