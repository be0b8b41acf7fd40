"""The tiers of the paged engine: the same bytes and tokens as without them, and pages that a later
process finds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from enginebay import LLM, SamplingParams
from enginebay.contracts.prefix_key import PrefixKey
from enginebay.outputs import RequestMetrics
from enginebay_esurge import eSurge
from enginebay_paged.engine import is_paged
from enginebay_paged.page_files import PageFiles
from enginebay_paged.prefix import key_digest, page_digests
from enginebay_runtime.engine import StepEngine
from tests.adapters import write_adapter
from tests.brief import BRIEF, TINY
from tests.pool import few_sizes
from tests.unit.esurge.small import OPTIONS

pytestmark = pytest.mark.xdist_group("tiny")

PAGE, NUM_PAGES, VOCAB_SIZE = 8, 17, 96
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "decode_steps": 4,
    "generation_config": "none",
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
HOST = {"prefix_host_bytes": 2**22}


@contextlib.contextmanager
def opened(*, num_pages: int = NUM_PAGES, **choices: Any) -> Iterator[LLM]:
    options = choices.pop("options", HOST)
    engine = {"name": "oengine", "page_size": PAGE, "num_pages": num_pages, **options}
    with few_sizes(), LLM(TINY, engine=engine, **(SIZES | choices)) as llm:
        yield llm


def prompts_of(count: int, length: int = 88, seed: int = 0) -> list[list[int]]:
    """Prompts that share nothing: the pool holds one of them and a half."""
    ids = np.random.default_rng(seed).integers(4, VOCAB_SIZE, (count, length))
    return [row.tolist() for row in ids]


def tokens_of(llm: LLM, prompt: list[int], **more: Any) -> tuple[list[int], RequestMetrics]:
    (output,) = llm.generate([prompt], GREEDY, **more)
    assert output.metrics is not None
    return list(output.outputs[0].token_ids), output.metrics


def engine_of(llm: LLM) -> StepEngine:
    assert is_paged(llm.engine)
    return llm.engine


def stored_pages(llm: LLM) -> dict[bytes, list[bytes]]:
    """The bytes of each page on the device that the prefix index knows, by hash."""

    def read() -> dict[bytes, list[bytes]]:
        engine = engine_of(llm)
        index = engine.ledger.groups["full"].store.index  # type: ignore[attr-defined]
        layers = engine.executor.arrays().cache["full"]
        arrays = [np.asarray(one) for layer in layers for one in layer.values()]
        return {
            digest: [array[page].tobytes() for array in arrays]
            for digest, page in index._pages.items()
        }

    return llm.run_on_engine(read)


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"kv_cache_dtype": "int8"}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"kv_cache_dtype": "uint4"}, marks=pytest.mark.slow),
        pytest.param({"mesh": {"tensor": 2}}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pages_come_back_bit_equal_and_give_the_same_tokens(choices: dict[str, Any]) -> None:
    prompts = prompts_of(3)
    with opened(**choices) as llm:
        first, metrics = tokens_of(llm, prompts[0])
        before = stored_pages(llm)
        assert (metrics.num_cached_tokens, metrics.num_host_tokens) == (0, 0)
        for prompt in prompts[1:]:
            tokens_of(llm, prompt)
        assert not before.keys() & stored_pages(llm).keys()
        again, metrics = tokens_of(llm, prompts[0])
        assert (metrics.num_cached_tokens, metrics.num_host_tokens) == (87, 87)
        after = stored_pages(llm)
        key = key_digest(PrefixKey(llm.engine.weights_version))
        digests = list(page_digests(key, np.asarray(prompts[0]), PAGE))
        assert len(digests) == 11
        for digest in digests[:10]:  # the last token, in the last page, is computed again
            assert before[digest] == after[digest]
        assert again == first
        llm.run_on_engine(engine_of(llm).ledger.check)


@pytest.mark.long
def test_weights_sleep_and_override_drop_the_host_tier() -> None:
    prompts = prompts_of(2)
    with opened() as llm:
        engine = engine_of(llm)
        for prompt in prompts:
            tokens_of(llm, prompt)
        llm.run_on_engine(lambda: (engine.drop_arrays(), engine.make_arrays()))
        assert tokens_of(llm, prompts[0])[1].num_cached_tokens == 0
        tokens_of(llm, prompts[1])
        weights = engine.executor.weights()
        name = next(iter(weights))
        llm.run_on_engine(lambda: engine.set_weights({name: weights[name]}))
        assert tokens_of(llm, prompts[0])[1].num_cached_tokens == 0


def disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {**HOST, "prefix_disk_dir": str(folder), **more}


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.page"))


def page_files(llm: LLM) -> PageFiles:
    found = engine_of(llm).host.keeper
    assert isinstance(found, PageFiles)
    return found


@pytest.mark.slow
def test_a_later_process_finds_the_pages_and_no_damaged_ones(tmp_path: Path) -> None:
    prompts = prompts_of(20)
    with opened(options=disk(tmp_path)) as llm:
        wanted = [tokens_of(llm, prompt)[0] for prompt in prompts]
    assert len(files_of(tmp_path)) >= 200, "close() writes the pages that are still cached"
    assert not list(tmp_path.rglob("*.tmp"))
    with opened(options=disk(tmp_path)) as llm:
        for prompt, tokens in zip(prompts, wanted, strict=True):
            found, metrics = tokens_of(llm, prompt)
            assert (metrics.num_disk_tokens, found) == (87, tokens)
    rng = np.random.default_rng(3)
    for number, path in enumerate(files_of(tmp_path)):
        data = bytearray(path.read_bytes())
        if number % 3 == 0:
            data = data[: int(rng.integers(0, len(data)))]
        elif number % 3 == 1:
            data[int(rng.integers(0, len(data)))] ^= 1 << int(rng.integers(0, 8))
        else:
            data[:8] = b"EBpage9\n"
        path.write_bytes(data)
    assert len(files_of(tmp_path)) >= 200
    with opened(options=disk(tmp_path)) as llm:
        for prompt, tokens in zip(prompts, wanted, strict=True):
            found, metrics = tokens_of(llm, prompt)
            assert (metrics.num_disk_tokens, found) == (0, tokens)
        assert page_files(llm).counts.read == 0


@pytest.mark.slow
def test_other_weights_and_dtypes_find_nothing(tmp_path: Path) -> None:
    prompts = prompts_of(2)
    with opened(options=disk(tmp_path)) as llm:
        for prompt in prompts:
            tokens_of(llm, prompt)
    with opened(options=disk(tmp_path), kv_cache_dtype="int8") as llm:
        assert tokens_of(llm, prompts[0])[1].num_cached_tokens == 0
    with opened(options=disk(tmp_path)) as llm:
        engine = engine_of(llm)
        weights = engine.executor.weights()
        name = next(
            name for name, one in weights.items() if isinstance(one, jax.Array) and one.ndim > 1
        )
        changed = np.asarray(weights[name]).copy()
        changed[0, 0] += 1e-3
        llm.run_on_engine(lambda: engine.set_weights({name: changed}))
        assert tokens_of(llm, prompts[0])[1].num_cached_tokens == 0
    with opened(options=disk(tmp_path)) as llm:
        assert tokens_of(llm, prompts[0])[1].num_disk_tokens == 87


@pytest.mark.slow
def test_pages_are_in_files_after_an_esurge_was_terminated(tmp_path: Path) -> None:
    options = {"engine_options": {"num_pages": 20, **disk(tmp_path)}, "compile_runner": False}
    prompt, params = "Once upon a time there was a fox. " * 3, SamplingParams(max_tokens=2)
    for num_read in (0, 1):
        with few_sizes(), eSurge(BRIEF, **OPTIONS | options) as surge:
            engine = surge._service.parts.engine
            assert is_paged(engine)
            keeper = engine.host.keeper
            assert isinstance(keeper, PageFiles)
            texts = [surge.generate(prompt, params)[0].outputs[0].text]
            assert (keeper.counts.read, keeper.counts.written) == (num_read, 0)
            surge.terminate()
            keeper.finish()
            assert len(files_of(tmp_path)) == 1
            surge.initiate()  # the pages are on the host
            texts.append(surge.generate(prompt, params)[0].outputs[0].text)
            assert texts[0] == texts[1]
            assert keeper.counts.read == num_read


SERVING = """
import sys
from tests.unit.test_prefix_tiers_engine import disk, opened, prompts_of, tokens_of
from pathlib import Path

with opened(options=disk(Path(sys.argv[1]))) as llm:
    print("ready", flush=True)
    for seed in range(1000):
        for prompt in prompts_of(8, seed=seed):
            tokens_of(llm, prompt)
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_folder_that_the_next_one_reads(tmp_path: Path) -> None:
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", SERVING, str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                have, end_s = len(files_of(tmp_path)), time.monotonic() + 60
                while len(files_of(tmp_path)) < have + 60:
                    assert time.monotonic() < end_s
                    time.sleep(0.01)
            finally:
                process.kill()
    with opened(options={}) as llm:
        wanted = [tokens_of(llm, prompt)[0] for prompt in prompts_of(3)]
    with opened(options=disk(tmp_path)) as llm:
        pairs = [tokens_of(llm, prompt) for prompt in prompts_of(3)]
        assert [tokens for tokens, _ in pairs] == wanted
        assert sum(metrics.num_disk_tokens for _, metrics in pairs) >= 88
        assert page_files(llm).counts.damaged <= 1


@pytest.mark.slow
def test_adapters_have_pages_of_their_own(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "poet", TINY, seed=1)
    other = write_adapter(tmp_path / "baker", TINY, seed=2)
    prompts = prompts_of(3)
    with opened(options={}, max_loras=2) as llm:
        llm.load_adapter("poet", str(folder))
        wanted = tokens_of(llm, prompts[0], lora="poet")[0]
    for adapter, num_disk in ((folder, 0), (folder, 87), (other, 0)):
        with opened(options=disk(tmp_path / "pages"), max_loras=2) as llm:
            llm.load_adapter("poet", str(adapter))
            found, metrics = tokens_of(llm, prompts[0], lora="poet")
            assert metrics.num_disk_tokens == num_disk
            if adapter == folder:
                assert found == wanted
            assert tokens_of(llm, prompts[0])[0] is not None
            for prompt in prompts[1:]:
                tokens_of(llm, prompt)
            assert tokens_of(llm, prompts[0], lora="poet")[1].num_host_tokens == 87
