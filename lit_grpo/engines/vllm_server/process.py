"""A vLLM server on this machine: started with what a run needs, and ended even when this process is killed."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lit_grpo.engines.base import EngineError
from lit_grpo.engines.vllm.arguments import check_server_arguments
from lit_grpo.engines.vllm.graphs import DECODING_GRAPHS
from lit_grpo.engines.vllm.installed import KEY, check_installed
from lit_grpo.engines.vllm.start import CPU_CACHE_BYTES
from lit_grpo.engines.vllm_server.cards import check_cards_of_servers, check_server_cards, environment_of_cards
from lit_grpo.engines.vllm_server.launch import ROOT, without_launcher
from lit_grpo.engines.vllm_server.process_log import ProcessLog, last_lines
from lit_grpo.engines.vllm_server.scratch import remove_scratch_folder
from lit_grpo.engines.vllm_server.supervised import Supervised
from lit_grpo.engines.vllm_server.worker import EXTENSION
from lit_grpo.errors import UserError
from lit_grpo.utils.ports import free_port

if TYPE_CHECKING:
    from lit_grpo.engines.config import ServerConfig, VLLMServerEngineConfig

# Not reachable from elsewhere: whoever reaches the server can run code in it.
HOST = "127.0.0.1"
STOP_SECONDS = 20.0
_LAST_PORT = 65535
_ERROR = re.compile(r"^(?:\([^)]*\) )?ERROR [^\]]*\] ((?:\w+\.)*\w+(?:Error|Exception): .*)$", re.MULTILINE)
"""The line of vLLM's log that ends a traceback."""


class ServerProcess:
    """One vLLM server, which can be started again and again.

    Args:
        model_path: folder with the model's configuration. No weights are read.
        port: 0 for any free one, the same at every start.
        engine_args: names and values of vLLM's command line, underscores for dashes; True for a bare flag, None leaves
            an argument out.
        env: variables added to this process's environment.
        scratch: folder that is removed when this process ends, however it ends.

    Raises:
        UserError: vLLM is not installed, or the port is taken.
    """

    def __init__(
        self, model_path: Path, *, port: int, engine_args: Mapping[str, Any], env: Mapping[str, str], scratch: Path
    ) -> None:
        _check_installed()
        self.port = _free_port(port)
        self.url = f"http://{HOST}:{self.port}"
        self.scratch = scratch
        self._log = ProcessLog(scratch)
        self._log_start = 0
        """Where the log of the last start begins, in bytes."""
        self._command = [*_server_command(model_path), *_as_options(engine_args)]
        self._command += ["--host", HOST, "--port", str(self.port)]
        self._env = {**without_launcher(os.environ), **_environment(), **env}
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), self._env.get("PYTHONPATH")]))
        self._process = Supervised(scratch, self.log, STOP_SECONDS)
        self._closed = False

    @property
    def log(self) -> Path:
        """File with the server's output. Removed at the end, unless a message has named it."""
        return self._log.path

    @property
    def running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process.running

    def start(self, seconds: float, ready: Callable[[], bool]) -> None:
        """Start the server, and wait until ``ready()`` says so, for ``seconds`` at most.

        A server that runs is ended first. If the start fails, no process of it is left.

        Raises:
            EngineError: the server ended, was not ready in time, or is closed.
        """
        self.stop()
        if self._closed:
            raise EngineError("the engine is closed")
        self._log_start = self.log.stat().st_size
        self._process.start(self._command, self._env)
        end = time.monotonic() + seconds
        while not ready():
            if not self.running:
                raise EngineError(f"the vLLM server ended before it was ready. {self.log_tail()}")
            if time.monotonic() > end:
                self.stop()
                raise EngineError(f"the vLLM server was not ready after {seconds:.0f} s. {self.log_tail()}")
            time.sleep(0.2)

    def log_tail(self) -> str:
        """Return the server's first error and the end of its log, and keep the file from now on."""
        text = self._log.keep(self._log_start)
        # The engine dies first, in another process than that which answers: the end tells only that it is gone.
        error = _ERROR.search(text)
        first = "" if error is None else f"Its first error: {error[1].strip()}\n"
        return f"{first}The end of its log ({self.log}):\n{last_lines(text)}"

    def stop(self) -> None:
        """End the server and everything it started."""
        self._process.stop()

    def close(self) -> None:
        """End the server for good, and remove its files."""
        self._closed = True
        self.stop()
        self._log.close()
        remove_scratch_folder(self.scratch)


def check_server_config(config: VLLMServerEngineConfig) -> None:
    """Check the settings of the engine before anything is started or imported.

    Raises:
        UserError: vLLM is needed and not installed, a setting makes no sense, or an argument of vLLM is the run's own.
    """
    server = config.server
    for name in ("start_seconds", "progress_seconds", "wait_seconds"):
        if getattr(server, name) <= 0:
            raise UserError(f"{name} is {getattr(server, name)}, must be above 0", where=f"{KEY}.server.{name}")
    if server.retries < 0:
        raise UserError(f"retries is {server.retries}, must be at least 0", where=f"{KEY}.server.retries")
    if server.url is None:
        check_server_arguments(config.args)
        _check_installed()
        check_server_cards(config)
        return
    if not server.url.startswith(("http://", "https://")):
        raise UserError(
            f"{server.url!r} is no address of a server", where=f"{KEY}.server.url", remedy="http://HOST:PORT"
        )
    named: dict[str, Any] = {"args": config.args}
    named |= {f"server.{name}": getattr(server, name) for name in ("env", "port", "cards")}
    for name, given in named.items():
        if given:
            raise UserError(
                f"{name} is for a server that is started here, and url names one that is running",
                where=f"{KEY}.{name}",
                remedy=f"remove it and give it to the running server, or remove {KEY}.server.url",
            )


def check_servers_of_ranks(config: VLLMServerEngineConfig, devices: Sequence[torch.device], processes: int) -> None:
    """Check that each rank of a run can have a server of its own, before anything is loaded or started.

    Args:
        config: settings of the servers.
        devices: of the ranks on this machine, in their order.
        processes: number of ranks on all machines.

    Raises:
        UserError: an address or the cards are the same for several ranks, there are not enough ports, or the cards do
            not fit the ranks.
    """
    _check_addresses(config.server, processes)
    if config.server.url is None:
        check_cards_of_servers(config, devices)


def _check_addresses(server: ServerConfig, processes: int) -> None:
    if server.url is not None and processes > 1 and "{rank}" not in server.url:
        raise UserError(
            f"{processes} processes train, and each needs a vLLM server of its own, but {server.url} is one address",
            where=f"{KEY}.server.url",
            remedy="put {rank} where the addresses differ (http://127.0.0.1:800{rank} for 8000, 8001, ...), or leave "
            "url out to have the servers started",
        )
    if server.port and server.port + processes - 1 > _LAST_PORT:
        raise UserError(
            f"{processes} processes train, each starts a vLLM server on a port of its own from {server.port} on, and "
            f"there is none above {_LAST_PORT}",
            where=f"{KEY}.server.port",
            remedy=f"{_LAST_PORT + 1 - processes} at most, or 0 for any free ones",
        )


def server_of_rank(server: ServerConfig, rank: int, processes: int, place: int = 0) -> ServerConfig:
    """Return the settings for one of several training processes, each of which has a server of its own.

    ``{rank}`` in the address and in values of ``env`` becomes the number of the process; a fixed port counts up; of
    ``cards`` it gets its own.

    Args:
        server: settings for all of them.
        rank: number of the process.
        processes: number of processes.
        place: of the process among those of its machine.

    Raises:
        UserError: the address is the same for all processes, or there are not enough ports.
    """
    _check_addresses(server, processes)
    number = str(rank)
    env = {name: value.replace("{rank}", number) for name, value in server.env.items()}
    return replace(
        server,
        url=None if server.url is None else server.url.replace("{rank}", number),
        port=server.port + rank if server.port else 0,
        env=env if server.cards is None else env | environment_of_cards(server.cards[place]),
    )


def _check_installed() -> None:
    check_installed(
        "a vLLM server cannot be started: vLLM is not installed",
        f"; or give the address of a running server as {KEY}.server.url",
    )


def default_engine_args() -> dict[str, Any]:
    """Return what a server must be started with, here or by hand, and what makes it fast on this machine."""
    args: dict[str, Any] = {
        # Weights come with the first sync; nothing is sampled before.
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": EXTENSION,
        # It brings /inference/v1/generate: ids in, ids out.
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
    }
    # The same choices as for the engine in this process, see lit_grpo.engines.vllm.start.
    if not torch.cuda.is_available():
        # A prompt that is split over two steps kills vLLM's CPU engine if its request has a seed.
        return {**args, "enforce_eager": True, "block_size": 32, "enable_chunked_prefill": False}
    return {**args, "compilation_config": DECODING_GRAPHS}


def _environment() -> dict[str, str]:
    env = {
        # It brings /collective_rpc, /reset_prefix_cache and /update_weight_version.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # The folder is complete: vLLM would wait for a hub that cannot be reached.
        "HF_HUB_OFFLINE": "1",
    }
    if not torch.cuda.is_available():
        env["VLLM_CPU_KVCACHE_SPACE"] = os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(CPU_CACHE_BYTES // 2**30))
    return env


def _server_command(model_path: Path) -> list[str]:
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        # The CPU build is a package of another name, and `vllm serve` fails without one called vllm.
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_path)]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_path)]


def _as_options(args: Mapping[str, Any]) -> list[str]:
    options = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if value is True:
            options.append(f"--{flag}")
        elif value is False:
            options.append(f"--no-{flag}")
        elif value is not None:
            options += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return options


def _free_port(port: int) -> int:
    if port == 0:
        return free_port(HOST)
    with socket.socket() as probe:
        # A server that ended just now does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"port {port} is in use, so no vLLM server can be started on it",
                where=f"{KEY}.server.port",
                remedy=f"set it to 0 (any free one); if a vLLM server runs there, set {KEY}.server.url to use it",
            ) from error
        return port
