"""Trains the demo model on the demo corpus and writes its checkpoint directory; deterministic from
a seed.

An interrupted run continues from its last checkpoint when it is started again with the same
arguments.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tokenizers import Tokenizer

import card
import corpus
import demo_llama
import demo_tokenizer as dt
import export
import packing

SHORT, LONG = 256, 1024
LONG_EVERY = 8
PROMPT_WEIGHT = 0.1
PEAK_RATE, WARMUP_STEPS = 4e-3, 60
EVAL_DOCUMENTS = 1500
LOG_EVERY = 20


@dataclass(frozen=True, slots=True)
class Data:
    """The tokenized corpus: packed training rows and held-out documents by kind."""

    short: packing.Rows
    long: packing.Rows
    heldout: dict[str, packing.Rows]
    num_train: int
    num_heldout: int


def read_corpus(path: Path, seed: int) -> list[corpus.Record]:
    """Read the corpus; generate it first where the file does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        corpus.write_corpus(path, seed, corpus.NUM_STORIES, corpus.NUM_CHATS)
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _texts(records: Sequence[corpus.Record]) -> list[str]:
    """The plain texts that the tokenizer learns from."""
    stories = [record["text"] for record in records if record["kind"] == "story"]
    turns = [
        turn["content"]
        for record in records
        if record["kind"] == "chat"
        for turn in record["messages"]
    ]
    return stories + turns + ["system\nuser\nassistant\n"] * 100


def _encode(tokenizer: Tokenizer, record: corpus.Record, prompt_weight: float) -> packing.Document:
    """One record as tokens and loss weights."""
    if record["kind"] == "story":
        return dt.encode_story(tokenizer, record["text"])
    return dt.encode_chat(tokenizer, record["messages"], prompt_weight)


def prepare(records: Sequence[corpus.Record], tokenizer: Tokenizer, seed: int) -> Data:
    """Tokenize and pack both splits; held-out chats count only what the assistant says."""
    train = [record for record in records if record["split"] == "train"]
    heldout = [record for record in records if record["split"] == "heldout"]
    short, long = packing.pack_training(
        [_encode(tokenizer, r, PROMPT_WEIGHT) for r in train], seed, SHORT, LONG
    )
    kinds = {}
    for kind in ("story", "chat"):
        documents = [_encode(tokenizer, r, 0.0) for r in heldout if r["kind"] == kind][
            :EVAL_DOCUMENTS
        ]
        fitting = [document for document in documents if len(document[0]) <= LONG + 1]
        kinds[kind] = packing.pack(fitting, LONG, separate=True)
    return Data(short, long, kinds, len(train), len(heldout))


def loss_sums(
    params: demo_llama.Params, rows: packing.Rows, shape: demo_llama.Shape, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of the negative log likelihoods, and the sum of the weights."""
    tokens, segments = jnp.asarray(rows.tokens), jnp.asarray(rows.segments)
    logits = demo_llama.forward(params, tokens[:, :-1], segments[:, :-1], shape, dtype)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    weights = rows.weights[:, 1:]
    return jnp.sum(losses * weights), jnp.sum(weights)


jax.tree_util.register_dataclass(packing.Rows, ["tokens", "weights", "segments"], [])


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers and Adam for the rest, on one cosine schedule."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_RATE, min(WARMUP_STEPS, num_steps // 4), num_steps, 0.0
    )

    def which(params: demo_llama.Params) -> dict[str, Any]:
        spec = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return {name: spec if demo_llama.is_hidden_matrix(name) else None for name in params}

    muon = optax.contrib.muon(
        schedule,
        weight_decay=0.05,
        adam_b2=0.98,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=which,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


@partial(jax.jit, static_argnames=("shape", "optimizer"), donate_argnums=(0, 1))
def train_step(
    params: demo_llama.Params,
    state: optax.OptState,
    rows: packing.Rows,
    shape: demo_llama.Shape,
    optimizer: optax.GradientTransformation,
) -> tuple[demo_llama.Params, optax.OptState, jax.Array]:
    """One update; returns the mean loss before it. Products run in bfloat16, parameters stay in
    float32.
    """

    def mean_loss(current: demo_llama.Params) -> jax.Array:
        total, weight = loss_sums(current, rows, shape, jnp.bfloat16)
        return total / weight

    loss, grads = jax.value_and_grad(mean_loss)(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def evaluate(
    params: demo_llama.Params, data: Data, shape: demo_llama.Shape
) -> dict[str, tuple[float, float]]:
    """Held-out loss and weight sums by kind, with the weights rounded as the checkpoint stores
    them.
    """
    stored = {name: value.astype(jnp.float32) for name, value in export.rounded(params).items()}
    sums = jax.jit(partial(loss_sums, shape=shape, dtype=jnp.float32))
    results = {}
    for kind, rows in data.heldout.items():
        total = weight = 0.0
        for start in range(0, len(rows.tokens), 4):
            part = rows.take(np.arange(start, min(start + 4, len(rows.tokens))))
            part_total, part_weight = sums(stored, part)
            total, weight = total + float(part_total), weight + float(part_weight)
        results[kind] = (total, weight)
    return results


def report(params: demo_llama.Params, data: Data, args: argparse.Namespace) -> export.Result:
    """Measure the held-out perplexity and gather what the model card says."""
    sums = evaluate(params, data, demo_llama.Shape())
    total, weight = (sum(values) for values in zip(*sums.values(), strict=True))
    by_kind = {kind: float(np.exp(loss / count)) for kind, (loss, count) in sums.items()}
    return export.Result(
        num_steps=args.steps,
        tokens_per_step=args.rows * SHORT,
        seed=args.seed,
        num_train=data.num_train,
        num_heldout=data.num_heldout,
        perplexity=float(np.exp(total / weight)),
        story_perplexity=by_kind["story"],
        chat_perplexity=by_kind["chat"],
        num_parameters=sum(value.size for value in params.values()),
    )


def save_state(path: Path, step: int, params: demo_llama.Params, state: optax.OptState) -> None:
    """Keep what a later start needs to continue; the file is replaced only when the new one is
    complete.
    """
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
    partial_path = path.with_suffix(".partial.npz")
    np.savez(partial_path, np.asarray(step), *leaves)
    partial_path.replace(path)


def load_state(
    path: Path, params: demo_llama.Params, state: optax.OptState
) -> tuple[int, demo_llama.Params, optax.OptState]:
    """The step, parameters and optimizer state of the last checkpoint; the arguments give their
    structure.
    """
    with np.load(path) as stored:
        step, *leaves = (stored[name] for name in stored.files)
    structure = jax.tree.structure((params, state))
    params, state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
    return int(step), params, state


def train(args: argparse.Namespace, data: Data, tokenizer: Tokenizer) -> demo_llama.Params:
    """Run the steps that are left, with a checkpoint every few minutes."""
    shape = demo_llama.Shape()
    optimizer = make_optimizer(args.steps)
    state_path = args.work / "state.npz"
    params = demo_llama.init_params(shape, args.seed)
    state, first = optimizer.init(params), 0
    if state_path.exists():
        first, params, state = load_state(state_path, params, state)
    short = packing.batches(data.short, args.rows, args.seed)
    long = packing.batches(data.long, max(1, args.rows * SHORT // LONG), args.seed + 1)
    started = saved = time.monotonic()
    for step in range(args.steps):
        rows = next(long if step % LONG_EVERY == LONG_EVERY - 1 else short)
        if step < first:
            continue
        params, state, loss = train_step(params, state, rows, shape, optimizer)
        if step % LOG_EVERY == 0:
            print(
                f"step {step} loss {float(loss):.4f} after {time.monotonic() - started:.0f} s",
                flush=True,
            )
        if time.monotonic() - saved > 60 * args.minutes:
            save_state(state_path, step + 1, params, state)
            export.write_checkpoint(args.out, params, tokenizer, shape)
            saved = time.monotonic()
    save_state(state_path, args.steps, params, state)
    return params


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        required=True,
        help="folder for the corpus and for what a restart needs",
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint directory to write")
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--rows", type=int, default=16, help="short rows in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=5.0, help="time between checkpoints")
    return parser.parse_args()


def main() -> None:
    """Train, measure and write the checkpoint with its model card."""
    args = parse_arguments()
    records = read_corpus(args.work / "corpus.jsonl", args.seed)
    shape = demo_llama.Shape()
    tokenizer = dt.train_tokenizer(
        _texts([r for r in records if r["split"] == "train"]), shape.vocab_size
    )
    data = prepare(records, tokenizer, args.seed)
    print(f"short rows {len(data.short.tokens)} long rows {len(data.long.tokens)}", flush=True)
    params = train(args, data, tokenizer)
    export.write_checkpoint(args.out, params, tokenizer, shape)
    result = report(params, data, args)
    print(result, flush=True)
    card.write_card(args.out, result, export.read_weights(args.out), tokenizer)


if __name__ == "__main__":
    main()
