"""docs/rewards.md: its YAML is accepted, and no reward is left out."""

import inspect
import re

import pytest

import lit_grpo.rewards
from lit_grpo.commands.score import read_rewards
from lit_grpo.rewards import Reward
from lit_grpo.rewards.isolation import sandbox
from tests.paths import ROOT

TEXT = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(rewards:.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_yaml_is_accepted(number, tmp_path):
    if "CodeReward" in BLOCKS[number] and sandbox.check():
        pytest.skip("no sandbox here")
    (tmp_path / "reward.yaml").write_text(BLOCKS[number])
    rewards, _ = read_rewards(str(tmp_path / "reward.yaml"))
    assert len(rewards) == BLOCKS[number].count("\n  - ")
    for reward in rewards:
        reward.close()


def test_every_reward_is_documented_with_yaml():
    names = [name for name in lit_grpo.rewards.__all__ if inspect.isclass(getattr(lit_grpo.rewards, name))]
    for name in names:
        if issubclass(getattr(lit_grpo.rewards, name), Reward) and name != "Reward":
            assert f"| `{name}` |" in TEXT
            assert any(f"lit_grpo.rewards.{name}" in block for block in BLOCKS), name
