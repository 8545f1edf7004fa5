"""A stand-in for a vLLM server: the same addresses and answers, no model, and failures on demand."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.waiting import PATIENCE

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class ModelConfig:
    """What VLLMServer reads of a transformers configuration."""

    def __init__(self, **changes: int) -> None:
        self.__dict__.update(SHAPE | changes)

    def get_text_config(self) -> ModelConfig:
        return self


def answer_ids(seed: int, weights: str) -> list[int]:
    """What it samples: a function of seed and weights."""
    return [random.Random(f"{seed} {weights} {i}").randrange(128) for i in range(1 + seed % 3)]


class StandIn:
    """Serves on a port of its own, in a thread, until ``die``; ``rise`` serves there again, without weights.

    Attributes:
        asked: seeds of the generations that were asked for, in order.
        parameters: the sampling parameters of the last of them.
        behave: called with each generation's seed before it is answered; may raise or sleep.
    """

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {
            "architectures": ["Qwen2ForCausalLM"],
            "shape": dict(SHAPE),
            "dtype": "float32",
            "max_model_len": 192,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "device": "cpu",
            "chunked_prefill": False,
            "altering": [],
        }
        self.extension = self.dev_mode = self.scale_out = self.tells_versions = True
        self.asked: list[int] = []
        self.parameters: dict[str, Any] = {}
        self.loads: list[str] = []
        self.added_tokens = 0
        self.tokens = 0
        self.port = 0
        self.load_error: str | None = None
        self.cache_resets = 0
        self.rise()

    async def behave(self, seed: int) -> None:
        return None

    def answer(self, seed: int, right: Any) -> Any:
        """The answer to a generation; replaced by tests of wrong ones."""
        return right

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rise(self) -> None:
        self.version, self.weights = "default", "base"
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self.thread.start()
        assert started.wait(PATIENCE)

    def die(self) -> None:
        """At once: connections break."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def _serve(self, started: threading.Event) -> None:
        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", self._answer)
            runner = web.AppRunner(app, shutdown_timeout=0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
            await site.start()
            self.port = runner.addresses[0][1]
            return runner

        asyncio.set_event_loop(self.loop)
        runner = self.loop.run_until_complete(start())
        started.set()
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        for server in (runner.server,):
            for connection in server.connections if server else []:
                if connection.transport is not None:
                    connection.transport.abort()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    async def _answer(self, request: web.Request) -> web.Response:
        path = "/" + request.match_info["path"]
        body = await request.json() if request.can_read_body else {}
        dev = {"/update_weight_version", "/collective_rpc", "/reset_prefix_cache", "/weight_info"}
        if path in dev and not self.dev_mode:
            return web.json_response({"detail": "Not Found"}, status=404)
        if path == "/inference/v1/generate":
            return await self._generate(body)
        if path == "/collective_rpc":
            return self._rpc(body)
        if path == "/update_weight_version":
            self.version = body["new_version"]
        if path == "/reset_prefix_cache":
            self.cache_resets += 1
            return web.json_response({"success": True})
        if path == "/metrics":
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {float(self.tokens)}\n')
        return web.json_response({"weight_version": self.version})

    def _rpc(self, body: dict[str, Any]) -> web.Response:
        if not self.extension:
            return web.json_response({"error": {"message": "no attribute"}}, status=500)
        if body["method"] == "lit_grpo_facts":
            return web.json_response({"results": [self.facts]})
        from safetensors import safe_open

        (folder,) = body["args"]
        self.loads.append(folder)
        if self.load_error:
            return web.json_response({"results": [{"error": self.load_error}]})
        (path,) = Path(folder).glob("*.safetensors")
        with safe_open(path, framework="pt") as file:
            self.weights = str(float(file.get_tensor("w").sum()))
        return web.json_response({"results": [{}]})

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        if not self.scale_out:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        seed = body["sampling_params"].get("seed", 0)
        if body["token_ids"] == [0]:  # the probe of a new engine
            versions = [{"version": self.version, "start": 0, "end": 1}] if self.tells_versions else None
            return web.json_response({"choices": [{"token_ids": [1], "weight_versions": versions}]})
        self.asked.append(seed)
        self.parameters = body["sampling_params"]
        version, weights = self.version, self.weights
        await self.behave(seed)
        ids = answer_ids(seed, weights)
        self.tokens += len(ids)
        choice = {
            "finish_reason": "stop",
            "token_ids": ids,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "logprobs": {"content": [{"token_id": i, "logprob": -0.5} for i in ids]},
        }
        usage = {"prompt_tokens": len(body["token_ids"]) + self.added_tokens}
        answer = self.answer(seed, {"choices": [choice], "usage": usage})
        return web.Response(text=json.dumps(answer), content_type="application/json")
