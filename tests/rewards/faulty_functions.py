"""Functions of a user that fail in every way there is; the text of the completion says when."""

import asyncio
import os
import sys
import threading
import time

from lit_grpo.types import Score


def sleeps(text: str) -> float:
    if text == "bad":
        time.sleep(600)
    return 1.0


def spins(text: str) -> float:
    while text == "bad":
        pass
    return 1.0


def holds_the_lock(text: str) -> float:
    if text == "bad":
        # In C, with the interpreter's lock held.
        return float((3 ** (3**20)) % 2)
    return 1.0


def deadlocks(text: str) -> float:
    if text == "bad":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    return 1.0


def raises(text: str) -> float:
    if text == "bad":
        raise KeyError("a missing key")
    return 1.0


def exits(text: str) -> float:
    if text == "bad":
        sys.exit(3)
    return 1.0


def interrupts(text: str) -> float:
    if text == "bad":
        raise KeyboardInterrupt
    return 1.0


def dies(text: str) -> float:
    if text == "bad":
        os._exit(0)
    return 1.0


def kills(text: str) -> float:
    if text == "bad":
        os.kill(os.getpid(), 9)
    return 1.0


def recurses(text: str) -> float:
    return recurses(text) if text == "bad" else 1.0


def batch_sleeps(texts: list[str]) -> list[float]:
    if "bad" in texts:
        time.sleep(600)
    return [1.0] * len(texts)


def batch_dies(texts: list[str]) -> list[float]:
    if "bad" in texts:
        os._exit(1)
    return [1.0] * len(texts)


def batch_raises(texts: list[str]) -> list[float]:
    if "bad" in texts:
        raise ValueError("a bad batch")
    return [1.0] * len(texts)


def too_few(texts: list[str]) -> list[float]:
    return [1.0] * (len(texts) - 1)


def no_list(texts: list[str]) -> float:
    return 1.0


def a_mapping(texts: list[str]) -> dict[str, float]:
    return dict.fromkeys(texts, 1.0)


def whole(items) -> list[float]:
    return [float(item.prompt.answer == "4") for item in items]


async def gives_way(text: str) -> float:
    await asyncio.sleep(600 if text == "bad" else 0)
    return 1.0


async def blocks(text: str) -> float:
    if text == "bad":
        time.sleep(600)
    return 1.0


async def raises_late(text: str) -> float:
    await asyncio.sleep(0.01)
    if text == "bad":
        raise ConnectionError("the server is away")
    return 1.0


async def batch_blocks(texts: list[str]) -> list[float]:
    if "bad" in texts:
        time.sleep(600)
    return [1.0] * len(texts)


def process(text: str) -> float:
    return float(os.getpid())


def prints(text: str) -> float:
    print("a word on the way")
    return 1.0


def large(texts: list[str]) -> list[Score]:
    return [Score(1.0, details={f"figure {i}": float(i) for i in range(20)})] * len(texts)


def two(text: str, extra: dict) -> float:
    return 1.0
