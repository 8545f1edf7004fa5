"""The rollout engine that samples by a vLLM server: another process, started here or elsewhere."""

from __future__ import annotations

import logging
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from lit_grpo.engines.base import EngineContext, EngineError, NamedWeights
from lit_grpo.engines.completion_checks import check_completion
from lit_grpo.engines.config import ServerConfig, VLLMServerEngineConfig
from lit_grpo.engines.stop_strings import StopStrings, stop_strings
from lit_grpo.engines.vllm.graphs import with_full_batch
from lit_grpo.engines.vllm.installed import KEY
from lit_grpo.engines.vllm.names import as_in_checkpoint
from lit_grpo.engines.vllm.requests import check_requests
from lit_grpo.engines.vllm.settings import (
    engine_dtype,
    model_config_of,
    runs_own_code,
    sampling_settings,
    stop_settings,
)
from lit_grpo.engines.vllm.start import OTHER_ENGINE
from lit_grpo.engines.vllm_server.cards import check_number_of_ranks, place_on_machine
from lit_grpo.engines.vllm_server.checks import HAND_COMMAND, check_server
from lit_grpo.engines.vllm_server.client import Answers, Client, Key, ServerRefusal, ServerTrouble, field, metric
from lit_grpo.engines.vllm_server.process import ServerProcess, check_server_config, default_engine_args, server_of_rank
from lit_grpo.engines.vllm_server.scratch import make_scratch_folder, remove_scratch_folder
from lit_grpo.engines.vllm_server.weights import write_weights
from lit_grpo.errors import UserError
from lit_grpo.types import Completion, Request, Sampling

log = logging.getLogger(__name__)

TOKENS_METRIC = "vllm:generation_tokens_total"
"""The server's count of sampled tokens, which stands still in a server that hangs."""
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_PROGRESS_CHECK_SECONDS = 2.0
"""How long no answer may come before the server is asked for its progress."""
_ABORT_SECONDS = 30.0
"""How long a server may take to drop samples that were cancelled."""


class VLLMServer:
    """A rollout engine that asks a vLLM server (0.32 or newer) over HTTP, ids in and ids out.

    Every sample is a request of its own with its own seed. Weights go through safetensors files (shared memory on one
    machine) which the server's workers load as :class:`lit_grpo.engines.VLLMEngine` does; that serves CPUs and GPUs,
    one worker or many. They are stamped in the server with the policy version and a mark of this run, and every
    completion brings the stamp of the weights that sampled each of its tokens: weights that are not those of the last
    sync (a server that was started again holds none of this run's) are never sampled from unnoticed.

    Failures: a connection that breaks is tried again. If the server died, hangs or lost its weights,
    ``settings.on_failure`` says what happens. Completions that were yielded stay; only the missing ones are asked for
    again, with the same seeds.

    Args:
        model_config: transformers configuration of the policy. The server is started with it and without weights.
        settings: which server, and what happens when it fails.
        end_token_ids: ids that end a completion.
        max_model_len: longest prompt plus completion, in tokens, that will be asked for.
        dtype: number format of the server's weights.
        max_num_seqs: completions sampled at once.
        gpu_memory_utilization: share of the card's memory, for a server that is started here.
        seed: seed of vLLM itself. What is sampled depends on the seeds of the requests alone.
        engine_args: further arguments of a server that is started here; they win over the defaults.
        weight_bytes: size of the weights, to choose where they are handed over.
        tokenizer: the policy's, to decode with where ``sampling.stop`` is set; a server that is started here gets it,
            too, so that it ends samples early. None: it never is set.
        model: the policy's transformers model, which knows its weights' names on disk. None: they come under those.

    Raises:
        UserError: vLLM is not installed, the port is taken, the server does not start with these settings, cannot be
            reached, serves another model, or was started without what this class needs.
    """

    def __init__(
        self,
        model_config: Any,
        settings: ServerConfig,
        *,
        end_token_ids: Sequence[int],
        max_model_len: int,
        dtype: str = "float32",
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.4,
        seed: int = 0,
        engine_args: dict[str, Any] | None = None,
        weight_bytes: int = 0,
        tokenizer: Any = None,
        model: Any = None,
    ) -> None:
        self._settings, self._model = settings, model
        self._tokenizer = tokenizer
        self.end_token_ids = tuple(sorted(set(end_token_ids)))
        self._vocab_size = int(model_config.get_text_config().vocab_size)
        self._run = uuid.uuid4().hex[:12]
        self._version = -1
        self._unusable: str | None = "no weights were given to it yet"
        self._stamp = ""
        """Stamp of the weights that the server must hold: the run's mark and the policy version."""
        self._open_generations = 0
        self._closed = False
        self._scratch = make_scratch_folder(settings.weights_folder, weight_bytes)
        # A run that ends with an exception closes nothing.
        self._remove_files = weakref.finalize(self, remove_scratch_folder, self._scratch)
        self._process: ServerProcess | None = None
        self._client: Client | None = None
        try:
            if settings.url is None:
                options = {
                    "dtype": dtype,
                    "max_model_len": max_model_len,
                    "max_num_seqs": max_num_seqs,
                    "gpu_memory_utilization": gpu_memory_utilization,
                    "seed": seed,
                    **default_engine_args(),
                    **({} if tokenizer is None else {"skip_tokenizer_init": False}),
                    **(engine_args or {}),
                }
                if "compilation_config" in options:
                    options["compilation_config"] = with_full_batch(
                        options["compilation_config"], options["max_num_seqs"]
                    )
                model_path = self._scratch / "model"
                model_config.save_pretrained(model_path)
                if tokenizer is not None:
                    tokenizer.save_pretrained(model_path)
                self._process = ServerProcess(
                    model_path, port=settings.port, engine_args=options, env=settings.env, scratch=self._scratch
                )
            # A few more than the server works on, so that its queue never runs empty.
            self._client = Client(settings.url or self._process.url, max_num_seqs + 32)  # type: ignore[union-attr]
            self._first_contact()
            own_log = None if self._process is None else self._process.log_tail
            facts = check_server(self._http, self._call_workers, model_config, max_model_len, own_log)
        except BaseException:
            self.close()
            raise
        self.max_model_len = int(facts["max_model_len"])
        self._dtype: torch.dtype = getattr(torch, facts["dtype"])

    @classmethod
    def from_context(cls, context: EngineContext, **settings: Any) -> Self:
        """Build the engine of a run; ``settings`` are those of ``VLLMServerEngineConfig``.

        Raises:
            UserError: a setting makes no sense; see also :class:`VLLMServer`.
        """
        config = VLLMServerEngineConfig(**settings)
        check_server_config(config)
        rank, processes = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
        place = 0
        if config.server.cards is not None:
            place, here = place_on_machine()
            check_number_of_ranks(len(config.server.cards), here)
        return cls(
            model_config_of(context),
            server_of_rank(config.server, rank, processes, place),
            end_token_ids=context.end_token_ids,
            max_model_len=config.max_model_len or context.max_model_len,
            dtype=engine_dtype(config.dtype, context.policy_config.dtype),
            max_num_seqs=config.max_num_seqs,
            gpu_memory_utilization=config.gpu_memory_utilization,
            seed=context.seed,
            engine_args={**({"trust_remote_code": True} if runs_own_code(context) else {}), **config.args},
            # A server without a tokenizer starts and samples faster, and few runs need one.
            tokenizer=context.tokenizer if context.wants_stop_strings else None,
            # A quantized weight has the shape of what it stands for elsewhere.
            model=context.policy.model,
            weight_bytes=sum(getattr(p, "quant_state", p).shape.numel() * 4 for p in context.policy.model.parameters()),
        )

    @property
    def policy_version(self) -> int:
        """Version of the weights in use; -1 before the first sync and after a failed one."""
        return self._version

    # ---------------------------------------------------------------------------------------------- set-up

    def _first_contact(self) -> None:
        if self._process is not None:
            try:
                self._process.start(self._settings.start_seconds, self._reachable)
            except EngineError as error:
                raise UserError(
                    f"no vLLM server can be started: {error}",
                    where=KEY,
                    remedy=f"mend what the log names ({KEY}.args, {KEY}.server), or raise {KEY}.server.start_seconds",
                ) from error
        elif not self._reachable():
            raise UserError(
                f"no vLLM server answers at {self._settings.url}",
                where=f"{KEY}.server.url",
                remedy="start it first and wait until /health answers, or leave url out to have one started: "
                + HAND_COMMAND,
            )

    # ---------------------------------------------------------------------------------------------- sampling

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every sample as it finishes; see :class:`lit_grpo.engines.base.RolloutEngine`.

        The server goes on sampling while the caller does something else. Closing or dropping the iterator cancels what
        is left. Several generations may be open at once.

        Raises:
            UserError: at the call: a request or a setting that vLLM would refuse or quietly change.
            EngineError: the engine is closed or holds no usable weights; the server failed and ``settings`` do not let
                it recover, or it did not recover.
        """
        self._require_weights()
        check_requests(requests, sampling, max_model_len=self.max_model_len, vocab_size=self._vocab_size)
        return self._generate(list(requests), sampling)

    def _generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Completion]:
        # The first of it is asked for now, which may be long after the call.
        self._require_weights()
        stops = stop_strings(sampling, self._tokenizer)
        missing: dict[Key, Any] = {
            (position, sample): {
                "token_ids": list(request.token_ids),
                "sampling_params": sampling_settings(sampling, self.end_token_ids, seed) | stop_settings(sampling),
            }
            for position, request in enumerate(requests)
            for sample, seed in enumerate(request.seeds)
        }
        pauses = self._pauses()
        first, self._open_generations = self._open_generations == 0, self._open_generations + 1
        try:
            # It empties the prefix cache, so that what is sampled depends on weights, requests and sampling alone, not
            # on earlier calls. Beside an open generation that cannot be done.
            if first:
                self._retry(self._prepare, pauses)
            while missing:
                answers = self._http.generate(missing)
                try:
                    while missing:
                        (position, sample), answer = self._next(answers)
                        completion = self._read(requests[position], sample, answer, stops, sampling)
                        # Before the yield: an answer that was handed out is never asked for again.
                        del missing[position, sample]
                        yield completion
                except ServerTrouble as trouble:
                    answers.cancel()
                    self._recover(trouble, pauses)
                except ServerRefusal as refusal:
                    raise EngineError(f"the vLLM server refuses a request: {refusal}") from refusal
                finally:
                    answers.cancel()
        finally:
            self._open_generations -= 1

    def _next(self, answers: Answers) -> tuple[Key, Any]:
        """Return the next answer and the key of its request.

        Raises:
            ServerTrouble: the request failed, the server ended, or it sampled no token for ``progress_seconds``.
            ServerRefusal: the server refused the request.
        """
        seconds = self._settings.progress_seconds
        tokens, end = float("nan"), time.monotonic() + seconds
        while (item := answers.next(min(seconds / 5, _PROGRESS_CHECK_SECONDS))) is None:
            if self._process is not None and not self._process.running:
                raise ServerTrouble("the server's process ended")
            now, count = time.monotonic(), self._tokens()
            if count > tokens:
                end = now + seconds
            elif now > end:
                raise _Hung(f"no token was sampled for {seconds:.0f} s")
            tokens = count
        return item

    def _tokens(self) -> float:
        """Return how many tokens the server has sampled so far; NaN if it does not say."""
        # With NaN only completions count as progress: no comparison with it is true.
        try:
            return metric(self._http.get("/metrics"), TOKENS_METRIC)
        except (ServerTrouble, ServerRefusal):
            return float("nan")

    def _read(
        self, request: Request, sample: int, answer: Any, stops: StopStrings | None, sampling: Sampling
    ) -> Completion:
        """Read and check an answer.

        Raises:
            ServerTrouble: it cannot be read, or says what cannot be; the next one may be right.
            EngineError: it was given for another prompt, or for other ids.
        """
        try:
            completion = self._completion(request, sample, answer, stops)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            name = f"sample {sample} of request {request.index}"
            raise ServerTrouble(f"the answer for {name} cannot be read: {type(error).__name__}: {error}") from error
        try:
            check_completion(completion, [request], sampling, vocab_size=self._vocab_size)
        except EngineError as error:
            raise ServerTrouble(str(error)) from error
        return completion

    # Whatever the server's answer says more than once must agree: ids, log-probabilities, prompt, weights.
    def _completion(self, request: Request, sample: int, answer: Any, stops: StopStrings | None) -> Completion:
        name = f"sample {sample} of request {request.index}"
        (choice,) = answer["choices"]
        reason, ids = choice["finish_reason"], tuple(choice["token_ids"])
        logged = choice["logprobs"]["content"] if choice["logprobs"] else []
        if reason not in ("stop", "length"):
            raise ServerTrouble(f"the server ended {name} with {reason!r}")
        stamps = {span["version"] for span in choice["weight_versions"] or ()}
        if stamps != {self._stamp}:
            raise ServerTrouble(f"{name} was sampled with weights {sorted(stamps)} instead of {self._stamp!r}")
        if tuple(entry["token_id"] for entry in logged) != ids:
            raise EngineError(f"the server gave {name} with {len(ids)} ids and log-probabilities of other ids")
        if answer["usage"]["prompt_tokens"] != len(request.token_ids):
            raise EngineError(
                f"the server read a prompt of {answer['usage']['prompt_tokens']} tokens for {name}, "
                f"which has {len(request.token_ids)}: it adds or drops tokens"
            )
        version = int(self._stamp.rpartition(":")[2])
        logprobs = tuple(entry["logprob"] for entry in logged)
        # A server that was started by hand may have no tokenizer, and samples past the end.
        if stops is not None and (end := stops.end(ids)) is not None:
            ids, logprobs, reason = ids[:end], logprobs[:end], "stop"
        return Completion(request.index, sample, ids, logprobs, reason, version)

    # ---------------------------------------------------------------------------------------------- weights

    def sync(self, weights: NamedWeights, version: int) -> None:
        """Load the weights of ``version``; forget cached prefixes.

        Weights may lie on any device and in any float format; they are read one at a time. They stay in a file until
        the next sync, for a server that has to be started again.

        Raises:
            EngineError: samples of an older version are still running, the weights do not fit the model, there is no
                room for them, or the server failed. After all but the first the engine refuses to sample until a sync
                succeeds.
        """
        self._require_open()
        if self._open_generations:
            raise EngineError(
                f"weights of version {version} came while {self._open_generations} generations of version "
                f"{self._version} are running: exhaust or close them first"
            )
        self._version, self._unusable = -1, f"a sync of version {version} did not finish"
        self._stamp = self._stamp_of(version)
        try:
            stream = weights if self._model is None else as_in_checkpoint(self._model, weights)
            write_weights(self._scratch / "weights", stream, self._dtype)
            self._retry(self._load, self._pauses())
        except Exception as error:
            self._unusable = f"the sync of version {version} failed: {error}"
            # Below 0 is none of a run's versions, but one of the check of the first sync.
            weights_named = f"the weights of version {version}" if version >= 0 else "the policy's weights"
            raise EngineError(f"{weights_named} cannot be loaded into vLLM: {error}. {OTHER_ENGINE}") from error
        self._version, self._unusable = version, None

    def _load(self) -> None:
        """Bring the files' weights into the server, and stamp them.

        Raises:
            ServerTrouble: the server was not reached.
            EngineError: the weights do not fit, or old prefixes stay.
        """
        # First the stamp of no weights: whatever happens in between, nothing old can pass for the new version.
        self._http.post("/update_weight_version", {"new_version": self._stamp_of("loading")})
        for answer in self._call_workers("lit_grpo_load_weights", str(self._scratch / "weights")):
            if "error" in answer:
                raise EngineError(answer["error"])
        self._forget_prefixes()
        self._http.post("/update_weight_version", {"new_version": self._stamp})

    def _prepare(self) -> None:
        loaded = self._loaded_stamp()
        if loaded != self._stamp:
            reason = "is not reached" if loaded is None else "lost its weights: it was started again"
            raise ServerTrouble(f"the server {reason}")
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        end = time.monotonic() + _ABORT_SECONDS
        # Samples that were cancelled hold their part of the cache until the server has dropped them.
        while not field(self._http.post("/reset_prefix_cache"), "success"):
            if time.monotonic() > end:
                raise EngineError(
                    "vLLM did not empty its prefix cache, so keys and values of old weights could be reused; "
                    "is somebody else using this server?"
                )
            time.sleep(0.1)

    def _call_workers(self, method: str, *args: str) -> list[dict[str, Any]]:
        body = {"method": method, "args": list(args)}
        results = field(self._http.post("/collective_rpc", body, self._settings.progress_seconds), "results")
        if not isinstance(results, list) or not results or not all(isinstance(answer, dict) for answer in results):
            raise ServerTrouble(f"the server's workers gave no answer to {method} that can be read")
        return results

    def _stamp_of(self, version: int | str) -> str:
        return f"{self._run}:{version}"

    def _loaded_stamp(self) -> str | None:
        """Return the stamp of the weights in the server; None if it cannot be reached."""
        try:
            return str(field(self._http.get("/weight_info"), "weight_version"))
        except ServerTrouble:
            return None

    # ---------------------------------------------------------------------------------------------- failures

    def _pauses(self) -> Iterator[float]:
        """Yield the seconds before each further attempt of one generation or sync."""
        for attempt in range(self._settings.retries):
            yield min(_FIRST_PAUSE_SECONDS * 2**attempt, _LONGEST_PAUSE_SECONDS)

    def _retry(self, action: Any, pauses: Iterator[float]) -> None:
        """Do ``action``; where the server failed, recover and do it again.

        Raises:
            EngineError: the server refuses a call, or cannot be recovered.
        """
        while True:
            try:
                action()
                return
            except ServerTrouble as trouble:
                self._recover(trouble, pauses)
            except ServerRefusal as refusal:
                raise EngineError(f"the vLLM server refuses a call: {refusal}") from refusal

    def _recover(self, trouble: ServerTrouble, pauses: Iterator[float]) -> None:
        """Wait for, or bring about, a server that answers and holds the last sync's weights.

        Raises:
            EngineError: the configuration does not allow it, or all attempts were used up.
        """
        while True:
            pause = next(pauses, None)
            if pause is None:
                raise EngineError(f"the vLLM server failed {self._settings.retries + 1} times: {trouble}") from trouble
            log.warning("The vLLM server failed: %s. Trying again in %.0f s.", trouble, pause)
            time.sleep(pause)
            loaded, hung = self._loaded_stamp(), isinstance(trouble, _Hung)
            # In a sync, which loads the weights itself.
            loading = self._unusable is not None
            # It passed. A server of one's own that hangs may answer this too, and is started again all the same.
            if loaded is not None and (loaded == self._stamp or loading) and not (hung and self._process is not None):
                return
            gone = self._process is not None and not self._process.running
            if self._settings.on_failure == "stop":
                # Not reached, perhaps for a moment only.
                if loaded is None and not gone and not hung:
                    continue
                raise EngineError(
                    f"the vLLM server failed: {trouble}. {KEY}.server.on_failure is stop; with recover the run would "
                    f"have gone on.{self._log_tail()}"
                ) from trouble
            try:
                if loaded is None or hung:
                    self._restart_server()
                if not loading:
                    self._load()
                log.warning("The vLLM server is back with the weights of version %s.", self._stamp.rpartition(":")[2])
                return
            except ServerTrouble as again:
                trouble = again

    def _restart_server(self) -> None:
        """Start the own server again, or wait for one that belongs to somebody else."""
        if self._process is not None:
            self._process.start(self._settings.start_seconds, self._reachable)
            return
        end = time.monotonic() + self._settings.wait_seconds
        while not self._reachable():
            if time.monotonic() > end:
                raise EngineError(
                    f"the vLLM server at {self._settings.url} did not come back within "
                    f"{self._settings.wait_seconds:.0f} s"
                )
            time.sleep(1.0)

    def _reachable(self) -> bool:
        try:
            self._http.get("/health")
        except (ServerTrouble, ServerRefusal):
            return False
        return True

    def _log_tail(self) -> str:
        return "" if self._process is None else f" {self._process.log_tail()}"

    # ---------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Break off what runs, end a server that was started here, remove the files. Safe to call twice."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            client.close()
        process, self._process = self._process, None
        if process is not None:
            process.close()
        self._remove_files()

    @property
    def _http(self) -> Client:
        self._require_open()
        assert self._client is not None
        return self._client

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _require_weights(self) -> None:
        self._require_open()
        if self._unusable:
            raise EngineError(f"the server must be given weights before it can sample: {self._unusable}")


class _Hung(ServerTrouble):
    """The server answers, but samples no token."""
