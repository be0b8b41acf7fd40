"""The whole plugin interface on one page: the hooks, and the declarations that plugins make.

A plugin is a module that an entry point of the group "enginebay" names. It implements any of the
hooks below, marked with `@hookimpl`. Each hook is called once at start-up with a callback
`register`. The hook calls it once for each part that the plugin offers, and names the place of the
part's code ("module:attribute") without importing that code.

    from enginebay.plugins.hooks import hookimpl

    @hookimpl
    def register_schedulers(register):
        register("lifo", "my_package.lifo:Lifo", options="my_package.lifo:LifoOptions",
        summary="newest first")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, Unpack

import pluggy

GROUP = "enginebay"
"""The group of the entry points of plugins."""


hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)

CAPABILITIES: dict[str, dict[str, str]] = {
    "model": {"architectures": "names in `config.json` that the family serves"},
    "checkpoint": {"models": "names of models that it opens where `checkpoint` is `auto`"},
    "kernel": {
        "custom_calls": "names of its XLA custom calls; without them its programs cannot be saved",
        "register_call": '"module:function" that registers the custom call of a name with XLA, for '
        "kernels that do so only when a step is traced: stored programs are loaded without tracing",
        "compiler": '"module:attribute" of an `enginebay_testing.toolchains.KernelCompiler`, for '
        "devices that are not here",
        "layouts": "cache layouts that it can write (`kv_write`, `rope_kv_write`); all when absent",
        "storages": 'quantised caches (`int8`, `uint4`, `fp8`) that it can write, or "any"; none '
        "when absent. Attention kernels use `Caps.kv_dtypes`",
        "sharded": "False: the compiler cannot split it. Split weights then use it only by name, "
        "with the op's `partition` rule",
        "quantizations": 'quantisation methods whose weights it reads, or "any"; plain arrays only '
        "when absent",
        "activation_quantizations": 'roundings of inputs that it does, such as "int8", or "any"; '
        "none when absent",
    },
    "sampler": {
        "greedy_only": "a request with a temperature is refused, and so is a request with a "
        "penalty, unless the processor `penalties` applies the penalty",
        "exact_greedy": "a greedy row gets the token with the largest logit, and the smallest id "
        "where logits are equal; greedy steps are compiled without the sampler",
        "draws": "name of an op, such as `sample`, whose chosen implementation the sampler gets as "
        "`draw=`",
    },
    "processor": {
        "order": "place in the order: below 100 for processors of logits, above 100 for processors "
        "of probabilities; last when absent",
        "default": "engines are made with it when `processors` is `auto`",
    },
    "scheduler": {
        "order": "which of requests that arrive together goes first: `arrival`, `priority`, "
        "`shortest_prompt` or `cached_prefix`",
    },
    "engine": {
        "logprobs": "its steps return log-probabilities",
        "full_vocab_logprobs": "its steps return log-probabilities of prompts and of the whole "
        "vocabulary",
        "hidden_states": "its steps return pooled hidden states",
        "prompt_embeds": "its steps take embeddings in place of tokens",
        "mixed_steps": "prefills may contain rows that decode",
        "verifies": "its steps verify drafts",
        "attention_problems": '"module:attribute" of a function '
        "(`enginebay.contracts.executor.EngineParts`, options) that returns the bucket and layouts "
        "of every step, for choosing kernels. Without it the largest step of each phase is assumed",
        "ledger_example": '"module:function" that returns an '
        "`enginebay_testing.ledgers.LedgerExample` for `enginebay check`",
    },
    "command": {"without_jax": "the command does not import JAX"},
    "format": {
        "reads": "what its parser finds, one or both of `tool_calls` and `reasoning`; must be there"
    },
}
"""The capabilities that enginebay reads, by kind of part, with their meanings. Every kind has
`priority`, too. A plugin may declare facts of its own under names with a dot, such as
"my_package.fact".
"""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a plugin declares about one part.

    `kind`: the kind of part, which follows from the hook. `name`: the name to choose the part by,
    without "/" and ":", and not "auto". `target`: where the code is, as "module:attribute";
    imported when the part is chosen. `options`: "module:attribute" of a frozen pydantic model with
    extra="forbid", or None. `summary`: one line for `enginebay plugins`. `op`: the op that a kernel
    implements; "" for other kinds. `interface`: the version of the contract that the part was
    written for. `platforms`: names of the platforms that the part supports; empty means all.
    `requires`: modules that must be installed. `extra`: the extra of the plugin's distribution that
    installs them. `capabilities`: facts that enginebay or other parts read, such as the
    architectures of a model family; see CAPABILITIES.
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


class DeclaredFacts(TypedDict, total=False):
    """The fields of a Declaration that a hook may pass to `register` besides name and target."""

    summary: str
    op: str
    options: str | None
    interface: int
    platforms: tuple[str, ...]
    requires: tuple[str, ...]
    extra: str | None
    capabilities: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Register:
    """The callback `register` of a hook: makes a Declaration of its arguments and passes it to
    `take`.
    """

    kind: str
    take: Callable[[Declaration], None]

    def __call__(self, name: str, target: str, **facts: Unpack[DeclaredFacts]) -> None:
        """Declare one part; the arguments are the fields of Declaration. PluginError for a wrong
        name, target, op, capability or list.
        """
        self.take(Declaration(self.kind, name, target, **facts))


class Hooks:
    """The hooks: one for each kind of part. A plugin implements those that it needs."""

    @hookspec
    def register_platforms(self, register: Register) -> None:
        """Register platforms: kinds of devices. Target: a subclass of
        `enginebay.contracts.platform.Platform` whose constructor takes no arguments.
        """

    @hookspec
    def register_checkpoints(self, register: Register) -> None:
        """Register checkpoint formats. Target: a callable that takes the name or path of a model
        and returns an `enginebay.contracts.model.Checkpoint`. A package that has a model in it
        lists the model's name in the capability `models`.
        """

    @hookspec
    def register_quantizations(self, register: Register) -> None:
        """Register methods that store weights in fewer bits. Target: a subclass of
        `enginebay.weights.Quantization`, whose constructor takes the options if some are declared.
        """

    @hookspec
    def register_models(self, register: Register) -> None:
        """Register model families. Target: an instance of `enginebay.contracts.model.ModelFamily`.
        The capability `architectures` lists the Hugging Face architectures that the family serves.
        """

    @hookspec
    def register_layouts(self, register: Register) -> None:
        """Register cache layouts. Target: a subclass of `enginebay.contracts.cache.KVLayout`."""

    @hookspec
    def register_ops(self, register: Register) -> None:
        """Register ops, which kernels implement. Target: an `enginebay.ops.op.Op` of the same name
        as the registered one.
        """

    @hookspec
    def register_kernels(self, register: Register) -> None:
        """Register kernels. The argument `op` of `register` names the op that a kernel implements.
        Target: an implementation with the signature of the op's record (`Op.signature`); for the
        op "attention", an `enginebay.ops.bound.AttentionImpl`.
        """

    @hookspec
    def register_samplers(self, register: Register) -> None:
        """Register samplers. Target: a function that follows `enginebay.contracts.sampler.Sampler`;
        for a sampler with options, a callable that takes the options and returns such a function.
        """

    @hookspec
    def register_processors(self, register: Register) -> None:
        """Register logits processors. Target: a subclass of
        `enginebay.contracts.processor.LogitsProcessor` whose constructor takes no arguments. The
        model in `options` validates the options that a request passes.
        """

    @hookspec
    def register_proposers(self, register: Register) -> None:
        """Register proposers of draft tokens. Target: a subclass of
        `enginebay.contracts.proposer.Proposer` whose constructor takes the options, if the part has
        any.
        """

    @hookspec
    def register_schedulers(self, register: Register) -> None:
        """Register schedulers. Target: a subclass of `enginebay.contracts.scheduler.Scheduler`
        whose constructor takes the options, if the part has any.
        """

    @hookspec
    def register_engines(self, register: Register) -> None:
        """Register engines. Target: a callable that takes
        (`enginebay.contracts.executor.EngineParts`, options) and returns an
        `enginebay.contracts.engine.Engine`.
        """

    @hookspec
    def register_commands(self, register: Register) -> None:
        """Register commands of the `enginebay` program. Target: an
        `enginebay.cli.command.Command`.
        """

    @hookspec
    def register_formats(self, register: Register) -> None:
        """Register formats in which models write tool calls or reasoning. Target: an
        `enginebay.contracts.output_format.OutputFormat`. The capability `reads` says what its
        parser finds.
        """


INTERFACE_VERSIONS = {
    name.removeprefix("register_").removesuffix("s"): 1
    for name in vars(Hooks)
    if name.startswith("register_")
}
"""Every kind of part, which is the name of its hook, with the version of its contract."""


FORMER_HOOKS = {
    "register_binders": "declare the rule `partition` of an op, by which its calls are split",
    "register_executors": "name the executor by its import path, in the configuration: "
    'executor = "module:attribute"',
    "register_logits_processors": "name the hook register_processors",
    "register_tool_parsers": 'register a format that declares reads=("tool_calls",) in its '
    "capabilities, by the hook register_formats",
    "register_reasoning_parsers": 'register a format that declares reads=("reasoning",) in its '
    "capabilities, by the hook register_formats",
    "register_grammars": 'name the library in the configuration: grammars = "module:attribute"',
    "register_guides": "register a logits processor, or set `grammars` to a library",
    "register_tunings": "ship tables of tuned configurations in the folder `tuned` of the package",
    "register_revisions": "register the part that the plan should use, such as a kernel",
}
"""Hooks of earlier versions: what a plugin that implements one should do today."""


FORMER_KINDS: dict[str, tuple[str, bool | None]] = {
    "logits_processor": ("processor", None),
    "tool_parser": ("format", True),
    "reasoning_parser": ("format", False),
}
"""Kinds of earlier versions, which users may still type: the kind of today, and whether formats of
the former kind read tool calls.
"""


FORMER_PLUGINS = frozenset({"executor", "startup", "byhand"})
"""Plugins of earlier versions of enginebay, which ENGINEBAY_PLUGINS may still list. A plugin of
another distribution may have such a name.
"""


def hook_name(kind: str) -> str:
    """Return the name of the hook that registers parts of a kind."""
    return f"register_{kind}s"


def make_manager() -> pluggy.PluginManager:
    """Make a pluggy manager that knows the hooks of enginebay and no plugin yet."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(Hooks)
    return manager
