"""Messages of plain values between a process that is not trusted and one that is.

They are text and never pickles, because unpickling runs code that the sender chooses. What cannot be written as plain
data becomes a handle, whose methods the other side can call. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_BYTES = 4_000_000
"""Length of the longest message, in bytes."""
_MAX_ITEMS = 200_000
_PLAIN_INT = 1 << 53


# Not named an error: it is an answer about a value of the candidate's, no fault of this program.
class Unplain(Exception):  # noqa: N818
    """Answer to a value that cannot be sent as plain data."""


def pack(value: Any, keep: Callable[[Any], int] | None = None) -> Any:
    """Write a value as something that JSON can hold.

    Args:
        value: plain data, or anything else where ``keep`` is given.
        keep: stores an object that is no plain data and returns its handle.

    Raises:
        Unplain: it is no plain data and there is no ``keep``, or it is an iterator without end.
    """
    # A subclass of str is brought back to str itself, past whatever __str__ it defines.
    if value is None or isinstance(value, (bool, str)):
        return value if type(value) in (bool, str, type(None)) else str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        # Long ones in hexadecimal, because Python refuses to read or write more than 4,300 decimal digits.
        return number if -_PLAIN_INT < number < _PLAIN_INT else {"i": hex(number)}
    if isinstance(value, float):
        return {"f": float(value).hex()}
    if isinstance(value, complex):
        return {"c": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, dict):
        return {"d": [[pack(k, keep), pack(v, keep)] for k, v in value.items()]}
    if isinstance(value, range):
        return {"r": [value.start, value.stop, value.step]}
    for kind, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, kind):
            return {tag: [pack(item, keep) for item in value]}
    if keep is None:
        raise Unplain(f"{type(value).__name__} is not plain data")
    # A generator is run to its end on this side; one without end is given up after _MAX_ITEMS.
    if hasattr(value, "__next__"):
        items = []
        for item in value:
            items.append(pack(item, keep))
            if len(items) > _MAX_ITEMS:
                raise Unplain("an iterator that does not end")
        return {"n": items}
    return {"h": keep(value)}


def unpack(packed: Any, handle: Callable[[int], Any]) -> Any:
    """Rebuild a value from :func:`pack`; every part is of a built-in type, or what ``handle`` makes of a handle.

    Raises:
        Unplain: the message has no known form.
    """
    if packed is None or isinstance(packed, (bool, str, int)):
        return packed
    if not isinstance(packed, dict) or len(packed) != 1:
        raise Unplain("a message of no known form")
    ((tag, body),) = packed.items()
    if tag == "i":
        return int(body, 16)
    if tag == "f":
        return float.fromhex(body)
    if tag == "c":
        return complex(float.fromhex(body[0]), float.fromhex(body[1]))
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "h":
        return handle(int(body))
    if tag == "d":
        return {unpack(k, handle): unpack(v, handle) for k, v in body}
    items = [unpack(item, handle) for item in body]
    if tag == "l":
        return items
    if tag == "r":
        return range(*items)
    builders: dict[str, Callable[[list[Any]], Any]] = {"t": tuple, "s": set, "z": frozenset, "n": iter}
    return builders[tag](items)


def write(message: Any) -> bytes:
    """Encode a message as JSON.

    Raises:
        Unplain: it is too long.
    """
    text = json.dumps(message).encode()
    if len(text) > MAX_BYTES:
        raise Unplain(f"{len(text)} bytes, more than {MAX_BYTES}")
    return text


def read(text: bytes) -> Any:
    """Decode a message of :func:`write`."""
    return json.loads(text)
