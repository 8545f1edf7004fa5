"""Functions of a user, for the reward that calls them."""

import asyncio
import os
import time

from lit_grpo.types import Score


def polite(text: str) -> float:
    return float("please" in text)


def both(texts, answers, prompt_ids, factor=1):
    return [factor * float(t == a) for t, a in zip(texts, answers, strict=True)]


async def slowly(text: str, answer: str | None = None) -> Score:
    await asyncio.sleep(30 if text == "hang" else 0.01)
    return Score(float(text == answer), no_answer=not text)


async def all_at_once(items) -> list[float]:
    return [float(len(item.text)) for item in items]


def hanging(text: str, extra: dict) -> float:
    if text == "hang":
        time.sleep(600)
    if text == "die":
        os._exit(0)
    return float(extra["n"])


def strange(texts, text): ...


def unknown(text, reference): ...


def nothing(): ...


class NotAFunction: ...
