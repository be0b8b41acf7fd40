"""Measures the formats of weights and caches on a real model, and prints the tables of
docs/quantization.md.

python tools/format_table.py FOLDER --gguf FILE --text FILE... [--llama-cpp PYTHON]

The quantised weights of the GGUF file are dequantised into a checkpoint in FOLDER, and this model
in float32 is the reference. Each format is scored as `enginebay eval` does, and answers 20 chats
greedily: one at a time, then all in one batch, which reuses the prompts' pages, and with --chunks
all in one batch whose prompts are computed in chunks of 16 tokens.
Results are kept in FOLDER/results.json; a format that has one is not measured again. PYTHON has
llama-cpp-python: the same model in float32, in llama.cpp's formats of weights, and in its formats
of caches.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from enginebay import LLM, SamplingParams
from enginebay.compose.stored_bytes import count_stored_bytes
from enginebay_bench.evaluate import EvalSizes, ScoredText, compare_scores, score_text, split
from enginebay_bench.scoring import Scored
from enginebay_models.gguf.source import GgufSource

SIZES: Mapping[str, Any] = {
    "engine": {"name": "oengine", "page_size": 16},
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 20,
    "max_num_batched_tokens": 512,
}
PASSAGE_LEN, NEW_TOKENS = 512, 24
REFERENCE = "float32"
FORMATS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {},
    "cache int8": {"kv_cache_dtype": "int8"},
    "cache uint4": {"kv_cache_dtype": "uint4"},
    "cache fp8": {"kv_cache_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "weights int8": {"quantization": "int8"},
    "weights int4": {"quantization": "int4"},
    "weights fp8": {"quantization": "fp8"},
    "weights int4, activations int8": {
        "quantization": "int4",
        "activation_quantization": "int8",
    },
    "weights int4, activations int8_group": {
        "quantization": "int4",
        "activation_quantization": "int8_group",
    },
    "file": {},
    "file, activations int8": {"activation_quantization": "int8"},
    "file, activations int8_group": {"activation_quantization": "int8_group"},
}
"""What each format is opened with; those of the file itself begin with FILE."""
FILE = "file"
PEERS: Mapping[str, tuple[str | None, str]] = {
    "llama.cpp float32": ("ALL_F32", "f32"),
    "llama.cpp cache f16": ("ALL_F32", "f16"),
    "llama.cpp cache q8_0": ("ALL_F32", "q8_0"),
    "llama.cpp cache q4_0": ("ALL_F32", "q4_0"),
    "llama.cpp weights bf16": ("MOSTLY_BF16", "f32"),
    "llama.cpp weights q8_0": ("MOSTLY_Q8_0", "f32"),
    "llama.cpp weights q4_0": ("MOSTLY_Q4_0", "f32"),
    "llama.cpp, the file's own weights": (None, "f32"),
}
"""Types of weights (None: those of the file) and caches; the first is the others' reference."""
PEER_REFERENCE = next(iter(PEERS))

COLUMNS = (
    "format",
    "perplexity",
    "KL, nats",
    "same best token",
    "equal answers",
    "tokens before the first other one",
    "in a batch",
    "in chunks of 16",
)

QUESTIONS = (
    "What is the capital of France?",
    "Hello! Who are you?",
    "Name three primary colors.",
    "How many days are in a week?",
    "Write a short poem about the sea.",
    "What is 12 times 3?",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "What does DNA stand for?",
    "Explain gravity to a child.",
    "List the planets of the solar system.",
    "What is the largest ocean on Earth?",
    "How do I boil an egg?",
    "Tell me a joke about cats.",
    "What is photosynthesis?",
    "Name a famous painter and one painting.",
    "What is the opposite of hot?",
    "How can I sleep better at night?",
)


def main() -> None:
    """Measure what has no result yet, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument(
        "--formats", default=";".join(FORMATS), help="names, separated by semicolons"
    )
    parser.add_argument("--chunks", action="store_true", help="also answer in chunks of 16 tokens")
    parser.add_argument("--llama-cpp", metavar="PYTHON")
    args = parser.parse_args()
    model = args.folder / "model"
    if not model.exists():
        write_plain(args.gguf, model)
    kept = args.folder / "results.json"
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    text = "".join(path.read_text(encoding="utf-8") for path in args.text)
    sizes = EvalSizes(args.num_tokens, PASSAGE_LEN, 1)
    reference = reference_scores(args.folder, model, text, sizes)
    for name in args.formats.split(";"):
        if name not in results:
            source = args.gguf if name.startswith(FILE) else model
            results[name] = measured(source, name, text, sizes, reference, chunks=args.chunks)
            kept.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if args.llama_cpp:
        for name in PEERS:
            if name not in results:
                results[name] = peer(args, name, reference)
                kept.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print("\n".join(table(results)))


def write_plain(gguf: Path, folder: Path) -> None:
    """Write the dequantised model of a GGUF file as a checkpoint in float32."""
    source = GgufSource(str(gguf))
    folder.mkdir(parents=True)
    whole = {
        name: np.ascontiguousarray(
            np.asarray(tensor.view()[(slice(None),) * len(tensor.shape)], np.float32)
        )
        for name, tensor in source.tensors.items()
    }
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config = dict(source.config) | {"torch_dtype": "float32"}
    tokenizer = source.load_tokenizer().inner
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    roles = dict(tokenizer.special_tokens_map) | {"chat_template": tokenizer.chat_template}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(roles), encoding="utf-8")


def opened(model: Path, name: str) -> LLM:
    """Load the model in a format."""
    return LLM(str(model), **{**SIZES, **FORMATS[name]})


def reference_scores(folder: Path, model: Path, text: str, sizes: EvalSizes) -> ScoredText:
    """Return the reference's passages and logits; the logits are kept in the folder."""
    path = folder / "reference.npy"
    with opened(model, REFERENCE) as llm:
        if not path.exists():
            found = score_text(llm, text, sizes)
            np.save(path, np.concatenate([one.logits for one in found.scored]))
        passages, stored = split(llm, text, sizes), count_stored_bytes(llm.plan)
        vocab_size = llm.plan.model.info.vocab_size
    whole, scored, start = np.load(path, mmap_mode="r"), [], 0
    for ids in passages.token_ids:
        scored.append(Scored(ids, (0,), whole[start : start + len(ids)]))
        start += len(ids)
    return ScoredText(passages, tuple(scored), stored, vocab_size)


def measured(
    model: Path,
    name: str,
    text: str,
    sizes: EvalSizes,
    reference: ScoredText,
    *,
    chunks: bool,
) -> dict[str, Any]:
    """Return the figures and the answers of a format."""
    with opened(model, name) as llm:
        mine = score_text(llm, text, sizes, passages=reference.passages)
        found = compare_scores(
            reference.passages,
            mine.scored,
            reference.scored,
            mine.stored_bytes,
            reference.stored_bytes,
        )
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        prompts = [
            list(llm.tokenizer.apply_chat_template([{"role": "user", "content": one}]))
            for one in QUESTIONS
        ]
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
        answers = {"alone": alone, "batch": llm.generate(prompts, params)}
    if chunks:
        with LLM(str(model), **{**SIZES, **FORMATS[name], "max_num_batched_tokens": 16}) as llm:
            answers["chunks"] = llm.generate(prompts, params)
    return {
        "perplexity": found.perplexity,
        "kl": found.prefill.mean,
        "same": found.same_argmax,
        "weights": mine.stored_bytes.weights,
        "cache_of_token": mine.stored_bytes.cache_of_token,
        "prompts": prompts,
        "answers": {
            how: [list(out.outputs[0].token_ids) for out in outs] for how, outs in answers.items()
        },
    }


def peer(args: argparse.Namespace, name: str, reference: ScoredText) -> dict[str, Any]:
    """Return llama.cpp's figures in one of its formats."""
    weights, kind = PEERS[name]
    results = json.loads((args.folder / "results.json").read_text(encoding="utf-8"))
    out = args.folder / f"peer-{weights}-{kind}.npy"
    job = {
        "gguf": str(args.gguf),
        "model": str(args.folder / f"{weights}.gguf" if weights else args.gguf),
        "weights": weights,
        "kind": kind,
        "passages": [list(map(int, ids)) for ids in reference.passages.token_ids],
        "prompts": results[REFERENCE]["prompts"],
        "new_tokens": NEW_TOKENS,
        "out": str(out),
    }
    child = Path(__file__).with_name("llama_cpp_scores.py")
    done = subprocess.run(
        [args.llama_cpp, child], input=json.dumps(job), capture_output=True, text=True, check=True
    )
    answers = json.loads(done.stdout.splitlines()[-1])
    base = np.load(args.folder / "peer-{}-{}.npy".format(*PEERS[PEER_REFERENCE]), mmap_mode="r")
    logits, pairs, start = np.load(out, mmap_mode="r"), [], 0
    for ids in reference.passages.token_ids:
        rows = slice(start, start + len(ids))
        pairs.append((Scored(ids, (0,), logits[rows]), Scored(ids, (0,), base[rows])))
        start += len(ids)
    mine, theirs = zip(*pairs, strict=True)
    stored = reference.stored_bytes
    found = compare_scores(reference.passages, mine, theirs, stored, stored)
    return {
        "perplexity": found.perplexity,
        "kl": found.prefill.mean,
        "same": found.same_argmax,
        "answers": {"batch": answers},
    }


def table(results: Mapping[str, Any]) -> Sequence[str]:
    """Return the rows of the table in Markdown."""
    lines = [
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for name, found in results.items():
        ours = not name.startswith("llama.cpp")
        how = "alone" if ours else "batch"
        base = results[REFERENCE if ours else PEER_REFERENCE]["answers"][how]
        answers = found["answers"]
        agree = [_agreeing(a, b) for a, b in zip(answers[how], base, strict=True)]
        own = [
            str(sum(a == b for a, b in zip(answers[other], answers["alone"], strict=True)))
            if ours and other in answers
            else ""
            for other in ("batch", "chunks")
        ]
        equal = sum(one == NEW_TOKENS for one in agree)
        cells = (
            name,
            f"{found['perplexity']:.3f}",
            f"{found['kl']:.5f}",
            f"{100 * found['same']:.1f} %",
            str(equal),
            f"{np.mean(agree):.1f}",
            *own,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _agreeing(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """Return the number of tokens before the first that differs."""
    for at, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if a != b:
            return at
    return len(mine)


if __name__ == "__main__":
    main()
