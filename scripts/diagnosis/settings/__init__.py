"""The settings of the second benchmark: which model learns what, from whom, and how it is judged apart from rewards."""

from __future__ import annotations

from scripts.diagnosis.settings.char_countdown import CharCountdown
from scripts.diagnosis.settings.char_tags import CharTags
from scripts.diagnosis.settings.qwen_gsm8k import QwenGsm8k
from scripts.diagnosis.settings.setting import Setting
from scripts.diagnosis.settings.smol_sums import SmolSums

SETTINGS: dict[str, Setting] = {
    setting.name: setting for setting in (QwenGsm8k(), SmolSums(), CharTags(), CharCountdown())
}
