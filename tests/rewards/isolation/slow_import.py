"""A function whose workers take for ever to get ready."""

import time


def warm_up() -> None:
    time.sleep(600)


def nothing(x: object) -> None:
    return None
