"""The sandbox, which confines a process for good before it runs code that nobody has read.

It needs Linux and the standard library alone.

Four layers, none of which needs privileges, and all of which work in a container with Docker's default profile:

- seccomp: an allow-list of system calls. No sockets, no new processes or programs, no signals to others, no tracing, no
  mounts, no changes to limits, no memory files; anything unknown is refused (``EPERM``).
- Landlock: of the file system only the Python library, shared libraries, time zones and ``/dev/null`` can be read;
  nothing can be written.
- resource limits: CPU seconds, address space, open files, no core dumps, no file growth. Threads: none, or as many as a
  supervisor allows (:mod:`lit_grpo.rewards.isolation.threads`), which the kernel asks before each.
- no new privileges, and no capabilities, also for root.

Time on the clock is not limited here: whoever started the process kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of the resources that a confined process may use."""

    memory: int
    """Bytes of address space that the process may map."""
    cpu: int
    """Seconds of CPU time after which the kernel ends the process."""
    open_files: int = 64


class SandboxError(OSError):
    """Error for a layer that cannot be put on here."""


# Numbers of system calls: (x86-64, aarch64); None where the call does not exist.
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "open": (2, None), "openat": (257, 56), "close": (3, 57), "stat": (4, None), "lstat": (6, None), "fstat": (5, 80),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents64": (217, 61),
    "getcwd": (79, 17), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe2": (293, 59),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132), "restart_syscall": (219, 128), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "pause": (34, None), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "times": (100, 153), "getrusage": (98, 165), "getrlimit": (97, 163), "sysinfo": (99, 179), "uname": (63, 160),
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "membarrier": (324, 283), "arch_prctl": (158, None), "getrandom": (318, 278), "exit": (60, 93),
    "exit_group": (231, 94),
}  # fmt: skip
_CLONE, _CLONE3, _KILL, _TGKILL, _SECCOMP = (56, 220), (435, 435), (62, 129), (234, 131), (317, 277)
_PRLIMIT, _IOCTL, _FCNTL, _CAPSET = (302, 261), (16, 29), (72, 25), (126, 91)
_IOCTLS = (0x5401, 0x541B, 0x5451, 0x5421)
"""Requests that ``ioctl`` may make: TCGETS, FIONREAD, FIOCLEX, FIONBIO."""
# Not F_SETOWN and F_SETSIG, which make the kernel send signals to other processes.
_FCNTLS = (0, 1, 2, 3, 4, 1030)
"""Commands that ``fcntl`` may give: to duplicate a descriptor, and to read and set flags."""
_CLONE_THREAD, _CLONE_NEW = 0x00010000, 0x7E020080
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 24, 38


def confine(
    limits: Limits, *, partly: bool = False, readable: Sequence[str] = (), threads: socket.socket | None = None
) -> list[str]:
    """Put every layer on this process; there is no way back.

    Args:
        limits: resources that it may use from now on.
        partly: go on without the layers that cannot be put on.
        readable: files and folders that it may read besides :func:`readable_paths`.
        threads: a Unix socket over which the supervisor of its threads gets the descriptor of the kernel's questions;
            closed afterwards. None: it may start no thread.

    Returns:
        The layers that are missing, with the reason; empty unless ``partly``.

    Raises:
        SandboxError: a layer is missing.
    """
    missing: list[str] = []
    libc = ctypes.CDLL(None, use_errno=True)
    # The filter comes last, because it refuses the very calls that put on the other layers.
    layers: tuple[tuple[str, Callable[[], None]], ...] = (
        ("limit", lambda: _limit(libc, limits)),
        ("drop privileges", lambda: _drop_privileges(libc)),
        ("close file system", lambda: _close_file_system(libc, [*readable_paths(), *readable])),
        ("ask for threads", lambda: _ask_for_threads(libc, threads)),
        ("filter calls", lambda: _filter_calls(libc, threads is not None)),
    )
    for name, layer in layers:
        try:
            layer()
        except OSError as error:
            if not partly:
                raise SandboxError(f"{name}: {error}") from error
            missing.append(f"{name}: {error}")
    return missing


def readable_paths() -> list[str]:
    """Return the files and folders that confined code may read."""
    library = Path(os.__file__).parent
    return [
        str(library), "/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo", "/etc/localtime",
        "/dev/null", "/dev/urandom", "/dev/zero",
    ]  # fmt: skip


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _limit(libc: ctypes.CDLL, limits: Limits) -> None:
    _check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CPU, limits.cpu),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_AS, limits.memory),
    ):
        hard = resource.getrlimit(what)[1]
        # Without privileges a hard limit can only be lowered; raising one that is lower already would fail.
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def _drop_privileges(libc: ctypes.CDLL) -> None:
    _check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            # No more of them; or the process is not privileged, and then there is none to lose.
            break
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    nothing = ctypes.create_string_buffer(bytes(24), 24)
    _check(libc.syscall(_CAPSET[_architecture()[0]], header, nothing), "capset")


def _close_file_system(libc: ctypes.CDLL, paths: Sequence[str]) -> None:
    # Each version of the kernel's interface handles more rights, and an older one refuses bits it does not know.
    version = _check(libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")
    handled = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        handled |= (1 << bit) if version >= since else 0
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("QQQ", handled, network, scopes)[: 24 if version >= 6 else 16 if version >= 4 else 8]
    rules = _check(
        libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "landlock_create_ruleset"
    )
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            access = _READ_FILE | (_READ_DIR if Path(path).is_dir() else 0)
            access |= _WRITE_FILE if path == "/dev/null" else 0
            rule = struct.pack("<Qi", access, descriptor)
            _check(libc.syscall(_LANDLOCK_ADD, rules, 1, rule, 0), f"landlock_add_rule {path}")
            os.close(descriptor)
    _check(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _architecture() -> tuple[int, int]:
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        raise OSError(f"no sandbox for {sys.platform} on {platform.machine()}, only Linux on x86_64 and aarch64")
    return _ARCHITECTURES[platform.machine()]


def _ask_for_threads(libc: ctypes.CDLL, threads: socket.socket | None) -> None:
    if threads is None:
        return
    index = _architecture()[0]
    # A filter of its own, since the one below refuses to send the descriptor. Of two filters the stricter answer holds,
    # so a new process is refused by that one without a question.
    steps = [(_LOAD, 0, 0, _NUMBER), (_EQUAL, 0, 1, _CLONE[index]), (_RETURN, 0, 0, _ASK), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(program))
    buffer = ctypes.create_string_buffer(header, len(header))
    # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_NEW_LISTENER.
    listener = _check(libc.syscall(_SECCOMP[index], 1, 8, buffer), "seccomp")
    try:
        socket.send_fds(threads, [b"l"], [listener])
    finally:
        os.close(listener)
        threads.close()


def _filter_calls(libc: ctypes.CDLL, threads: bool) -> None:
    code = filter_program(os.getpid(), threads)
    program = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
    buffer = ctypes.create_string_buffer(header, len(header))
    # PR_SET_SECCOMP and SECCOMP_MODE_FILTER, which need no privileges once no_new_privs is set.
    _check(libc.prctl(22, 2, buffer, 0, 0), "seccomp")


_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _REFUSE, _NO_CALL, _END, _ASK = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000, 0x7FC00000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16


def filter_program(pid: int, threads: bool) -> bytes:
    """Assemble the BPF program of the filter, for a process of this id that may or may not start threads."""
    index, architecture = _architecture()
    # The numbers of the calls hold for one architecture alone, so a call by another one's ends the process.
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _END),
        (_LOAD, 0, 0, _NUMBER),
    ]

    def when(call: int | None, body: list[tuple[int, int, int, int]]) -> None:
        if call is not None:
            program.extend([(_EQUAL, 0, len(body), call), *body])

    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)

    def only(argument: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        checks = [step for value in values for step in ((_EQUAL, 0, 1, value), allow)]
        return [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *checks, refuse]

    for numbers in _ALLOWED.values():
        when(numbers[index], [allow])
    # A filter cannot see the flags of clone3, which lie in memory; without it the C library falls back to clone.
    when(_CLONE3[index], [(_RETURN, 0, 0, _NO_CALL)])
    # Threads may be started where somebody counts them, processes never.
    if threads:
        when(
            _CLONE[index],
            [(_LOAD, 0, 0, _ARGUMENTS), (_BITS, 1, 0, _CLONE_NEW), (_BITS, 1, 0, _CLONE_THREAD), refuse, allow],
        )
    when(_KILL[index], only(0, (pid,)))
    when(_TGKILL[index], only(0, (pid,)))
    when(_IOCTL[index], only(1, _IOCTLS))
    when(_FCNTL[index], only(1, _FCNTLS))
    # Limits may be read, not changed: both halves of the pointer to new ones must be null.
    when(
        _PRLIMIT[index],
        [
            (_LOAD, 0, 0, _ARGUMENTS + 16), (_EQUAL, 0, 3, 0),
            (_LOAD, 0, 0, _ARGUMENTS + 20), (_EQUAL, 0, 1, 0), allow, refuse,
        ],
    )  # fmt: skip
    program.append(refuse)
    return b"".join(struct.pack("HBBI", *step) for step in program)


def check() -> str:
    """Say why the sandbox does not work here; empty if it does. Confines a process to find out."""
    import subprocess

    if sys.platform != "linux":
        return "the sandbox needs Linux"
    # In a process of its own, since confinement has no way back; -I and -S leave the user's modules out of it.
    command = [sys.executable, "-I", "-S", __file__]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0 and done.stdout.strip() == "confined":
        return ""
    return (done.stderr.strip() or f"the trial process ended with {done.returncode}").splitlines()[-1]


def _try_to_get_out() -> None:
    """Try one forbidden thing of each layer.

    Raises:
        SandboxError: one went through.
    """
    for what, attempt in (
        ("read files", lambda: os.open("/etc/passwd", os.O_RDONLY)),
        ("start processes", os.fork),
        ("signal others", lambda: os.kill(os.getppid(), 0)),
        ("open sockets", socket.socket),
        ("raise limits", lambda: resource.setrlimit(resource.RLIMIT_CPU, (20, 20))),
    ):
        try:
            attempt()
        except (OSError, ValueError):
            continue
        raise SandboxError(f"confined processes can still {what}")


if __name__ == "__main__":
    ours, theirs = socket.socketpair()
    confine(Limits(memory=1 << 30, cpu=10), threads=theirs)
    _try_to_get_out()
    print("confined")
