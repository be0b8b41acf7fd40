"""The whole plugin interface on one page: the hooks a plugin may implement, and what it declares
through them.

A plugin is a module named by an entry point of the group "enginebay". It implements any of the
hooks below with `@hookimpl`; each is called once at start-up with a `register` callback, and says
what the plugin offers and where its code lies ("module:attribute"), without importing that code.

    from enginebay.hooks import hookimpl

    @hookimpl
    def register_schedulers(register):
        register("lifo", "my_package.lifo:Lifo", options="my_package.lifo:LifoOptions",
        summary="newest first")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

GROUP = "enginebay"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

INTERFACE_VERSIONS: dict[str, int] = {
    "startup": 1,
    "platform": 1,
    "checkpoint": 1,
    "quantization": 1,
    "model": 1,
    "layout": 1,
    "op": 1,
    "kernel": 1,
    "by_hand": 1,
    "sampler": 1,
    "logits_processor": 1,
    "grammar": 1,
    "guide": 1,
    "tuning": 1,
    "proposer": 1,
    "scheduler": 1,
    "executor": 1,
    "engine": 1,
    "revision": 1,
    "command": 1,
}
"""Every kind of part, with the version of its contract. A new kind is one row here and one hook
below.
"""

CAPABILITIES: dict[str, tuple[str, ...]] = {
    "startup": ("priority",),
    "model": ("priority", "architectures"),
    "kernel": ("priority", "custom_calls", "compiler", "layouts", "sharded", "quantizations"),
    "by_hand": ("priority",),
    "sampler": ("priority", "greedy_only", "exact_greedy", "draws"),
    "logits_processor": ("order", "default"),
    "grammar": ("priority",),
    "guide": ("priority",),
    "tuning": ("priority",),
    "scheduler": ("priority", "order"),
    "engine": (
        "priority",
        "logprobs",
        "full_vocab_logprobs",
        "hidden_states",
        "prompt_embeds",
        "mixed_steps",
        "verifies",
        "attention_problems",
        "ledger_example",
    ),
    "revision": ("priority",),
    "command": ("without_jax",),
}
"""The capabilities that enginebay reads, by kind; see docs/plugins.md. A name with a dot is a
plugin's own.
"""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a plugin says of one part.

    `target` and `options` are "module:attribute", imported when the part is picked; `options` names
    a frozen pydantic model with extra="forbid". `platforms` empty means any. `requires` are modules
    that must be installed, `extra` the extra of the plugin's distribution that installs them.
    `interface` is the contract's version it was written for. `capabilities` are facts that other
    parts may ask for, such as the architectures of a model family: those of CAPABILITIES, and a
    plugin's own, whose names have a dot ("my_package.fact").
    """

    kind: str
    name: str
    target: str
    summary: str = ""
    op: str = ""
    options: str | None = None
    interface: int = 1
    platforms: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    extra: str | None = None
    capabilities: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """The callback that a hook of one kind is given; the arguments are Declaration's, with `op` for
    kernels only. `take` receives each declaration.
    """

    kind: str
    take: Callable[[Declaration], None]

    def __call__(
        self,
        name: str,
        target: str,
        *,
        summary: str = "",
        op: str = "",
        options: str | None = None,
        interface: int = 1,
        platforms: tuple[str, ...] = (),
        requires: tuple[str, ...] = (),
        extra: str | None = None,
        capabilities: Mapping[str, Any] | None = None,
    ) -> None:
        """Declare one part. PluginError for what the host could not work with."""
        facts = (platforms, requires, extra, dict(capabilities or {}))
        self.take(Declaration(self.kind, name, target, summary, op, options, interface, *facts))


class Hooks:
    """The hooks, one for each kind."""

    @hookspec
    def register_startups(self, register: Register) -> None:
        """What is done in this process before an engine is planned and JAX starts. Target: a
        callable that takes the `enginebay.config.EngineConfig`.
        """

    @hookspec
    def register_platforms(self, register: Register) -> None:
        """Devices to run on. Target: a class of `enginebay.platform.Platform`, made with no
        arguments.
        """

    @hookspec
    def register_checkpoints(self, register: Register) -> None:
        """Where models come from. Target: a callable name_or_path ->
        `enginebay.model.Checkpoint`.
        """

    @hookspec
    def register_quantizations(self, register: Register) -> None:
        """Methods of storing weights in fewer bits. Target: a class of
        `enginebay.weights.Quantization`, made with no arguments.
        """

    @hookspec
    def register_models(self, register: Register) -> None:
        """Model families. Target: a `ModelFamily` instance; capability `architectures` names what
        it serves.
        """

    @hookspec
    def register_layouts(self, register: Register) -> None:
        """Cache layouts. Target: a subclass of `enginebay.cache.KVLayout`."""

    @hookspec
    def register_ops(self, register: Register) -> None:
        """Ops that kernels may implement. Target: an `enginebay.ops.op.Op`, of the same name."""

    @hookspec
    def register_kernels(self, register: Register) -> None:
        """Implementations of an op. Target: what `enginebay.ops.bound` describes for `op`, or what
        the plugin that registered the op says.
        """

    @hookspec
    def register_by_hands(self, register: Register) -> None:
        """What serves implementations that nobody registered. Target: an
        `enginebay.compose.by_hand.ByHand`.
        """

    @hookspec
    def register_samplers(self, register: Register) -> None:
        """Samplers. Target: a function by `enginebay.sampler.Sampler`; with options, a callable
        options -> Sampler.
        """

    @hookspec
    def register_logits_processors(self, register: Register) -> None:
        """Logits processors. Target: a class of `enginebay.processor.LogitsProcessor`, made with no
        arguments; `options` are a request's.
        """

    @hookspec
    def register_grammars(self, register: Register) -> None:
        """Libraries of grammars. Target: a subclass of `enginebay.constraint.GrammarLibrary`, made
        with a Vocabulary and its options.
        """

    @hookspec
    def register_guides(self, register: Register) -> None:
        """What makes grammars of requests. Target: a callable (registry, configuration) ->
        `enginebay.constraint.MakeGuide`.
        """

    @hookspec
    def register_tunings(self, register: Register) -> None:
        """What knows the fastest configurations of kernels. Target: a callable (registry,
        configuration) -> `enginebay.ops.tuning.Tuning`.
        """

    @hookspec
    def register_proposers(self, register: Register) -> None:
        """Proposers of draft tokens. Target: a class by `enginebay.proposer.Proposer`, made with
        its options.
        """

    @hookspec
    def register_schedulers(self, register: Register) -> None:
        """Schedulers. Target: a subclass of `enginebay.scheduler.Scheduler`, made with its
        options.
        """

    @hookspec
    def register_executors(self, register: Register) -> None:
        """What runs engines' commands. Target: a callable `enginebay.executor.parts.EngineParts` ->
        `Executor` of the same module.
        """

    @hookspec
    def register_engines(self, register: Register) -> None:
        """Engines. Target: a callable `enginebay.executor.parts.EngineParts`, options ->
        `enginebay.engine.Engine`.
        """

    @hookspec
    def register_revisions(self, register: Register) -> None:
        """Changes of a plan before anything is made of it. Target: a callable that takes the
        `enginebay.compose.composition.Plan` and returns the one to use.
        """

    @hookspec
    def register_commands(self, register: Register) -> None:
        """Commands of the `enginebay` program. Target: an `enginebay.cli.command.Command`."""


def hook_name(kind: str) -> str:
    """The hook that registers a kind."""
    return f"register_{kind}s"


def make_manager() -> pluggy.PluginManager:
    """A pluggy manager that knows our hooks and no plugin."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    return manager
