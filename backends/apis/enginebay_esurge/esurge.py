"""eSurge: the documented API over the paged engine; requests have ids, and serving can pause."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, Unpack

import jax.numpy as jnp

from enginebay.compose.plan import Plan
from enginebay.contracts.adapters import required
from enginebay.contracts.engine import Engine
from enginebay.contracts.model import Checkpoint
from enginebay.contracts.text import Message
from enginebay.errors import RequestError
from enginebay.serving.arguments import check_keywords
from enginebay.serving.observer import Observers
from enginebay.serving.prepare import Param, check_streamable
from enginebay.serving.priority import BatchKeywords, RequestKeywords, priorities_of
from enginebay.serving.prompts import Prompt, Prompts, as_prompts
from enginebay_esurge.context import ContextRules, TruncateMode
from enginebay_esurge.errors import no_template
from enginebay_esurge.jobs import Jobs, SamplingCallback, ids_for
from enginebay_esurge.monitoring import Monitoring
from enginebay_esurge.monitoring_settings import MonitoringSettings
from enginebay_esurge.opening import load_engine, prepare_model
from enginebay_esurge.outputs import RequestOutput
from enginebay_esurge.profiling import Profiler
from enginebay_esurge.service import Service
from enginebay_esurge.serving import Serving, Updates
from enginebay_esurge.settings import EngineSettings, FurtherChoices, take_unused_options
from enginebay_esurge.weights import load_changes, paged, swap

log = logging.getLogger("enginebay.esurge")


class eSurge:  # noqa: N801  # the name its users know
    """Serves requests by id over the paged engine; prompts are fitted to the context.

    `model` is a folder, a hub id, "demo", or an open `enginebay.contracts.model.Checkpoint`, which
    requires a `tokenizer`. The constructor loads and compiles it; `initiate()` or a `with` block
    starts serving. All methods are thread-safe. Options:

    tokenizer: Folder, hub id, or a tokenizer of transformers; None: the model's own.
    dtype: Dtype of weights, activations and cache.
    max_model_len: The longest context; the default is at most the model's own.
    max_num_seqs: Max completions that run together.
    max_num_batched_tokens: Max prompt tokens in one step; None: 1024.
    hbm_utilization: `memory_utilization` of the engine.
    page_size: Tokens of a page.
    enable_prefix_caching: `prefix_caching` of the engine.
    compile_runner: Compile the largest steps while loading, and the others while serving.
    use_aot_forward: With `compile_runner`, a step that needs a missing program is an error.
    auto_shard_model: Split over devices as `sharding_axis_dims` says; False: one device.
    sharding_axis_dims: Devices along the axes dp, fsdp, ep, tp, sp. Only tp may have more than one.
    -1: all, or as many as divide the model's dimensions.
    overlap_execution: Launch the next step before the last one's tokens are read: faster, same
    tokens.
    runner_verbose: Log each program that is compiled.
    silent_mode: No progress bars, and no effect of `runner_verbose`.
    esurge_name: The engine's name; None: model type and billions of weights.
    reserve_tokens: Tokens of the context that stay free; None: a tenth of `max_model_len`.
    auto_truncate_prompt: A prompt that exceeds the context loses tokens.
    auto_cap_new_tokens: `max_tokens` is reduced to what fits after the prompt.
    strict_context: A request that needs a forbidden cut is a ValueError.
    truncate_mode: What a long prompt loses: its beginning ("left"), its end ("right") or its middle
    ("middle").
    prefer_preserve_prompt: New tokens are capped before the prompt is truncated.
    decode_truncated_prompt: `output.prompt` is the truncated text.
    destroy_pages_on_pause: pause() frees the cache's memory if no request has a row.
    sampling_params_callback: As in `set_sampling_params_callback`.
    extra_eos_token_ids: More end-of-sequence tokens.
    sampler_metrics: Return log-probabilities of chosen tokens for every request, as `logprobs=0`
    does.
    min_input_pad: No effect; another value is logged.
    detokenizer_max_states: No effect; another value is logged.
    tokenizer_endpoint: No effect; another value is logged.
    detokenizer_endpoint: No effect; another value is logged.
    kwargs: Fields of EngineConfig, such as `seed` and `decode_steps`, and `engine_options` for the
    rest of the engine's section, such as `{"num_pages": 100}`.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        tokenizer: Any = None,
        dtype: Any = jnp.bfloat16,
        max_model_len: int = 8192,
        min_input_pad: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        hbm_utilization: float = 0.85,
        page_size: int = 128,
        use_aot_forward: bool = True,
        enable_prefix_caching: bool = True,
        auto_shard_model: bool = True,
        sharding_axis_dims: Sequence[int] = (1, 1, 1, -1, 1),
        compile_runner: bool = True,
        runner_verbose: bool = False,
        overlap_execution: bool = False,
        sampler_metrics: bool = False,
        esurge_name: str | None = None,
        reserve_tokens: int | None = None,
        auto_truncate_prompt: bool = True,
        auto_cap_new_tokens: bool = True,
        strict_context: bool = False,
        truncate_mode: TruncateMode = "left",
        prefer_preserve_prompt: bool = True,
        decode_truncated_prompt: bool = True,
        destroy_pages_on_pause: bool = True,
        detokenizer_max_states: int = 65536,
        tokenizer_endpoint: str | None = None,
        detokenizer_endpoint: str | None = None,
        sampling_params_callback: SamplingCallback | None = None,
        extra_eos_token_ids: Sequence[int] | None = None,
        silent_mode: bool = False,
        **kwargs: Unpack[FurtherChoices],
    ) -> None:
        take_unused_options(
            min_input_pad, detokenizer_max_states, tokenizer_endpoint, detokenizer_endpoint
        )
        settings = EngineSettings(
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            hbm_utilization=hbm_utilization,
            page_size=page_size,
            enable_prefix_caching=enable_prefix_caching,
            use_aot_forward=use_aot_forward,
            compile_runner=compile_runner,
            auto_shard_model=auto_shard_model,
            sharding_axis_dims=sharding_axis_dims,
            overlap_execution=overlap_execution,
            more=kwargs,
        )
        level = logging.INFO if runner_verbose and not silent_mode else logging.DEBUG
        rules = ContextRules(
            max_model_len=max_model_len,
            reserve_tokens=reserve_tokens,
            auto_truncate_prompt=auto_truncate_prompt,
            auto_cap_new_tokens=auto_cap_new_tokens,
            strict_context=strict_context,
            truncate_mode=truncate_mode,
            prefer_preserve_prompt=prefer_preserve_prompt,
        )
        prepared = prepare_model(model, tokenizer, settings)
        preparer = prepared.make_preparer(extra_eos_token_ids or ())
        self._jobs = Jobs(
            preparer, rules, sampling_params_callback,
            decodes_truncated=decode_truncated_prompt, returns_logprobs=sampler_metrics,
        )  # fmt: skip
        self._name, self._silent = esurge_name or prepared.default_name(), silent_mode
        parts, others = load_engine(prepared.plan, log, level, compiles=compile_runner)
        preparer.max_cached = parts.engine.ledger.max_tokens
        self._service = Service(parts, others, drops_cache=destroy_pages_on_pause)
        self._serving = Serving(self._service, prepared.tokenizer)
        self._profiler = Profiler(self._service)
        self._monitoring = Monitoring(self._service, self._serving.totals, self._name)
        # Without terminate() too, no thread, server or trace may outlive this object, or JAX.
        for stop in (self._monitoring.stop, self._profiler.stop, self._service.stop):
            weakref.finalize(self, stop)

    def __repr__(self) -> str:
        model = self.plan.config.model
        return f"eSurge({model!r}, esurge_name={self._name!r}, {self._service.state})"

    def __enter__(self) -> Self:
        self.initiate()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    @property
    def esurge_name(self) -> str:
        """The name that was passed, or "{model type}-{billions of parameters}b"."""
        return self._name

    @property
    def monitoring_active(self) -> bool:
        """Whether monitoring is running."""
        return self._monitoring.is_active

    @property
    def profiling_active(self) -> bool:
        """Whether a profile is being recorded."""
        return self._profiler.is_active

    @property
    def plan(self) -> Plan:
        """The parts that were chosen, with reasons."""
        return self._service.parts.plan

    @property
    def engine(self) -> Engine:
        """The engine. Use it on the engine's thread only (see `run_on_engine`)."""
        return self._service.parts.engine

    @property
    def audience(self) -> Observers:
        """Observers of the engine's work (enginebay.serving.observer): call add() or remove()."""
        return self._service.audience

    def run_on_engine(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread between steps (here when stopped)."""
        return self._service.call(function)

    @property
    def num_pending_requests(self) -> int:
        """Number of requests without a running completion."""
        return self._service.num_requests[0]

    @property
    def num_running_requests(self) -> int:
        """Number of requests with a running completion; a request with n > 1 counts once."""
        return self._service.num_requests[1]

    def initiate(self) -> None:
        """Start serving, or resume after pause(); does nothing while running."""
        self._service.start()
        self._serving.totals.begin()

    def terminate(self) -> None:
        """Stop serving and profiling; monitoring stays. Unfinished requests fail with StoppedError.

        initiate() starts again without compiling.
        """
        self._service.end()
        self._profiler.stop()
        self._jobs.close()

    def pause(self) -> None:
        """Stop launching steps. Requests stay, and can be aborted; new requests are refused.

        With destroy_pages_on_pause the cache's memory is freed, unless a request occupies it.
        """
        self._service.pause()

    def resume(self) -> None:
        """Continue after pause(), with a new cache if it was freed. The same as initiate()."""
        self.initiate()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: Param = None,
        request_id: str | Sequence[str] | None = None,
        use_tqdm: bool = True,
        **turns: Unpack[BatchKeywords],
    ) -> list[RequestOutput]:
        """Complete prompts (texts, or lists of token ids). Returns one output per prompt, in order.

        sampling_params None is SamplingParams(max_tokens=128). n > 1 computes the prompt once.
        `use_tqdm` shows a progress bar on a terminal. Some schedulers read `priority` (larger is
        more urgent) and `tenant`, and `lora` names an adapter: one value, or one per prompt. The
        keywords are those of LLM.generate. Nothing is queued after
        NotRunningError (a RuntimeError) or RequestError (a ValueError: wrong prompts, values or
        ids). A completion's error is raised and ends the others; an aborted one has finish_reason
        "abort".
        """
        check_keywords(eSurge.generate, turns, BatchKeywords)
        self._service.check_running()
        listed = as_prompts(prompts)
        ids, own = ids_for(len(listed), request_id), priorities_of(len(listed), **turns)
        jobs = self._jobs.make(listed, sampling_params, ids, own, self)
        return self._serving.collect(jobs, is_shown=use_tqdm and not self._silent)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: Param = None,
        request_id: str | None = None,
        **turn: Unpack[RequestKeywords],
    ) -> Updates:
        """Complete one prompt; yields an output with delta_text for each part, the last one
        `finished`.

        Checked and queued at once, with the errors of generate(), and RequestError for several
        prompts. A slow reader gets all text. Closing or dropping the iterator ends the request.
        """
        check_keywords(eSurge.stream, turn, RequestKeywords)
        self._service.check_running()
        listed = as_prompts(prompts)
        if len(listed) != 1:
            given = f"{len(listed)} prompts to stream"
            raise RequestError(given, "one prompt", "Use generate(), or a stream per prompt.")
        own = priorities_of(1, **turn)
        [job] = self._jobs.make(listed, sampling_params, ids_for(1, request_id), own, self)
        check_streamable([job.prepared])
        return self._serving.updates(job)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling_params: Param = None,
        request_id: str | None = None,
        stream: bool = False,
        chat_template: str | None = None,
        **turn: Unpack[RequestKeywords],
    ) -> Any:
        """Answer a conversation: a RequestOutput, or with `stream` an iterator of RequestOutputs.

        `tools`: functions for the chat template. `chat_template`: Jinja text instead of the model's
        template. ValueError for empty or wrong messages; NoTemplateError without a template.
        """
        check_keywords(eSurge.chat, turn, RequestKeywords)
        self._service.check_running()
        if chat_template is None and not self._jobs.tokenizer.has_chat_template:
            raise no_template()
        ids: list[Prompt] = [
            self._jobs.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=chat_template
            )
        ]
        if stream:
            return self.stream(ids, sampling_params, request_id, **turn)
        return self.generate(ids, sampling_params, request_id, use_tqdm=False, **turn)[0]

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Read a LoRA adapter, for requests with lora=name, as LLM.load_adapter does."""
        required(self.plan.adapters, f"load_adapter({name!r})").load(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. AdapterInUseError while an unfinished request uses it."""
        adapters = required(self.plan.adapters, f"unload_adapter({name!r})")
        self._service.call(lambda: adapters.unload(name, self._service.adapters_in_use))

    def abort_request(self, request_id: str) -> None:
        """Abort a request with all its completions. Its reader gets the output so far. An unknown
        or finished id is ignored.
        """
        self._serving.abort(request_id)

    @contextlib.contextmanager
    def override(self, *, check: bool = True, **implementations: Any) -> Iterator[Self]:
        """Run steps with other implementations of ops within the block, as in LLM.override.

        Works for a stopped or paused engine too, whose cache is then allocated. IncorrectError for
        a failed quick check, RequestError (a ValueError) while there are requests. Requests at the
        end of the block stop with StoppedError.
        """
        with self._service.override(implementations, check=check):
            yield self

    def set_sampling_params_callback(self, callback: SamplingCallback | None) -> None:
        """Call `callback` with a copy of each request's parameters, and {request_id, prompt,
        engine}.

        It may change the copy, return others, or None. If it raises, the request is unchanged.
        """
        self._jobs.callback = callback

    def get_metrics_summary(self) -> dict[str, Any]:
        """Return the engine's totals, times in seconds; {"error": ...} before initiate().

        requests_per_second is of the last minute. Failed: aborted, dropped, or ended by an error.
        """
        totals = self._serving.totals
        if not totals.has_begun:
            return {"error": "the engine was not initiated: call initiate()"}
        return totals.summary() | {
            "active_requests": self._serving.num_open,
            "queue_size": self.num_pending_requests,
            "running_requests": self.num_running_requests,
        }

    def start_monitoring(
        self,
        dashboard_port: int | None = None,
        prometheus_port: int = 11184,
        dashboard_host: str | None = None,
        enable_prometheus: bool = True,
        enable_dashboard: bool | None = None,
        enable_console: bool = False,
        log_file: str | None = None,
        log_interval: float = 10.0,
        history_size: int = 1000,
        enable_detailed_logging: bool = True,
        start_grafana: bool = True,
        grafana_port: int = 3000,
        grafana_host: str | None = None,
        grafana_image: str = "grafana/grafana-oss:latest",
        grafana_use_docker: bool = False,
        grafana_admin_user: str = "admin",
        grafana_admin_password: str = "admin",
        grafana_allow_anonymous: bool = True,
        grafana_datasource_name: str = "eSurge Prometheus",
        grafana_datasource_uid: str | None = None,
        grafana_datasource_url: str | None = None,
    ) -> dict[str, str]:
        """Start monitoring. Returns the URLs "prometheus" and "grafana". A second call changes
        nothing. Missing packages are skipped with a warning. ValueError, with nothing started: a
        wrong value, a used port or an unwritable log file.

        enable_prometheus: Serve metrics, which needs the extra `metrics`.
        prometheus_port: Port at 127.0.0.1, one for each engine; 0 is any free port.
        enable_console: Figures on standard error, twice a second.
        log_file: Append lines of JSON to this file.
        log_interval: Seconds between two lines of `log_file`.
        enable_detailed_logging: Log a line for each completed request as well.
        history_size: Recent updates, steps and requests that means cover.
        start_grafana: Start a `grafana-server` that is on PATH, with a data source and a dashboard.
        grafana_use_docker: Without a `grafana-server`, start the container `grafana_image`.
        grafana_image: The container's image, which must have been pulled before.
        grafana_port: Port of Grafana.
        grafana_host: None: localhost. A name that is not a loopback name opens Grafana to all.
        grafana_admin_user: Grafana's account.
        grafana_admin_password: Its password; change it before others can reach Grafana.
        grafana_allow_anonymous: A visitor without a password is an administrator.
        grafana_datasource_name: Name of the data source.
        grafana_datasource_uid: Uid of the data source; None: `esurge-prometheus`.
        grafana_datasource_url: The Prometheus server that Grafana queries; None: start the
        `prometheus` that is on PATH. Without a server the dashboard stays empty.
        dashboard_port: No effect; a value is a DeprecationWarning.
        dashboard_host: No effect; a value is a DeprecationWarning.
        enable_dashboard: No effect; a value is a DeprecationWarning.
        """
        return self._monitoring.start(
            MonitoringSettings(
                dashboard_port=dashboard_port,
                prometheus_port=prometheus_port,
                dashboard_host=dashboard_host,
                enable_prometheus=enable_prometheus,
                enable_dashboard=enable_dashboard,
                enable_console=enable_console,
                log_file=log_file,
                log_interval=log_interval,
                history_size=history_size,
                enable_detailed_logging=enable_detailed_logging,
                start_grafana=start_grafana,
                grafana_port=grafana_port,
                grafana_host=grafana_host,
                grafana_image=grafana_image,
                grafana_use_docker=grafana_use_docker,
                grafana_admin_user=grafana_admin_user,
                grafana_admin_password=grafana_admin_password,
                grafana_allow_anonymous=grafana_allow_anonymous,
                grafana_datasource_name=grafana_datasource_name,
                grafana_datasource_uid=grafana_datasource_uid,
                grafana_datasource_url=grafana_datasource_url,
            )
        )

    def stop_monitoring(self) -> None:
        """Stop everything that start_monitoring() started."""
        self._monitoring.stop()

    def start_profiling(
        self,
        output_dir: str | Path,
        num_batches: int = 10,
        host_tracer_level: int | None = None,
        python_tracer_level: int | None = None,
    ) -> None:
        """Record the next `num_batches` scheduler updates with JAX's profiler into a folder.
        BusyError (a RuntimeError) while this process is profiled, ValueError for num_batches < 1.
        """
        self._profiler.start(output_dir, num_batches, host_tracer_level, python_tracer_level)

    def stop_profiling(self) -> None:
        """End a profile early and write it. Does nothing without a profile."""
        self._profiler.stop()

    def update_model_weights(
        self,
        model: str | Path | Checkpoint | None = None,
        *,
        graphdef: Any = None,
        graphstate: Any = None,
        graphother: Any = None,
        restart_scheduler: bool = True,
    ) -> None:
        """Use other weights of the same shapes: a model's, or some by path (mapping or nnx.State).

        Compiles nothing and clears the prefix cache; both weights are in memory meanwhile. A
        `graphdef` changes nothing. A running engine continues unless restart_scheduler is False.
        BusyError (a RuntimeError) while there are requests. ValueError, keeping the old weights,
        for none or wrong ones.
        """
        service = self._service
        with service.lock:
            service.check_idle()
            change = load_changes(service.parts.plan, model, graphdef, graphstate, graphother)
            engine = paged(service.parts.engine)
            service.call(lambda: swap(engine, change))
            if not restart_scheduler:
                service.stop()
