"""``python -m lit_grpo``: the command ``lit-grpo``, also where its console script is not on the path."""

from lit_grpo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
