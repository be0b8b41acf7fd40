"""A sampling parameter is declared once: whatever carries it derives from the field."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from enginebay.ops.row_columns import FLOATS, INTS, by_name, neutral_columns, write_row
from enginebay.row_value import RowValue
from enginebay.types import ROW_VALUES, SamplingParams
from tests.sampling_values import run_with_top_a

ROOT = Path(__file__).parents[2]

SCRIPT = """
import argparse, json
import jax
import jax.numpy as jnp
import numpy as np
from enginebay.cli.generate import add_sampling_arguments, sampling_from
from enginebay.errors import RequestError
from enginebay.ops.sampling import first_best
from enginebay.ops.row_columns import write_row
from enginebay_runtime.rows import RowTable
from enginebay_runtime import device
from enginebay.ops import prefill_columns as columns
from enginebay_runtime.assemble import empty_plan
from enginebay.contracts.sampler import SamplingState
from enginebay.types import FrozenSampling, Request, SamplingParams
from enginebay_dashinfer.sampling import to_sampling
from enginebay_oengine import ModelRunnerSamplingMetadata, SequenceBuffer
from enginebay_samplers import standard
from enginebay_vinference.requests import APPLIED
from tools.reference_tables import flags_of
from tools.sampling_page import parameters

try:
    SamplingParams(top_a=2.0)
except RequestError as error:
    refused = str(error)
parser = argparse.ArgumentParser()
add_sampling_arguments(parser)
def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)

params = sampling_from(parser.parse_args(["--top-a", "0.75", "--temperature", "1"]))
request = Request("r", np.asarray([5], np.int32), FrozenSampling(1, params), (0, 0), 0.0)
table = RowTable(2, 8, 8, 10, [4])
row = table.add_request(request)
ints, floats = empty_plan(1, 2)
write_row(floats[0], ints[0, columns.PARAMS : columns.STOP_IDS], request.sampling.params)
rows = device.rows_from_plan(ints, floats, np.zeros((1, 8), np.int32))
rows = jax.tree.map(jnp.asarray, rows)

def kept(z, seeds, *, top_k, top_p, min_p):
    return np.isfinite(z)

logits = np.log(np.asarray([[0.5, 0.4, 0.1]], np.float32))
state = rows.sampling_state()
draws = np.asarray([True])
print(json.dumps({
    "refused": refused,
    "dashinfer": refusal(lambda: to_sampling({"top_a": 0.5}, 4, 16)),
    "metadata": refusal(
        lambda: ModelRunnerSamplingMetadata.from_sequence_buffer(SequenceBuffer.of(table), 2)
    ),
    "vinference": "top_a" in APPLIED,
    "view": SequenceBuffer.of(table).get_active_sampling_params(row),
    "device": [float(rows.params.top_a[0]), str(rows.params.top_a.dtype)],
    "taken": [float(x) for x in rows.take(np.asarray([0, 1]), 0).params.top_a],
    "saved": "top_a" in rows.columns(),
    "kept": standard._drawn(logits, draws, state, kept).tolist(),
    "docs": [
        line
        for line in (*parameters(), *flags_of("generate").splitlines())
        if "top" in line and "_a`" in line or "-a " in line
    ],
}))
"""


@pytest.mark.long
def test_a_plugins_parameter_touches_its_declaration_and_the_file_that_computes_it(
    tmp_path: Path,
) -> None:
    found = json.loads(run_with_top_a(tmp_path, SCRIPT))
    assert found["refused"].startswith("top_a = 2.0. Allowed: a number from 0 to 1.")
    assert found["view"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "top_a": 0.75}
    assert found["dashinfer"].startswith("unknown field of a generation 'top_a'")
    assert found["metadata"].startswith("row 0 with top_a")
    assert found["vinference"]
    assert found["device"] == [0.75, "float32"]
    assert found["taken"] == [0.75, 0.0], "a row past the end has the neutral value"
    assert found["saved"], "the row's state that is taken and put has it"
    assert found["kept"] == [[True, True, False]]
    assert len(found["docs"]) == 2


def test_every_declared_value_fits_its_array_and_is_neutral_where_nothing_is_asked() -> None:
    assert {*FLOATS, *INTS} == set(ROW_VALUES)
    floats, ints = neutral_columns(2)
    before = {name: column.copy() for name, column in by_name(floats, ints).items()}
    write_row(floats[0], ints[0], SamplingParams())
    for name, column in by_name(floats, ints).items():
        assert column.dtype == ROW_VALUES[name].dtype
        assert (column == before[name]).all(), name


def test_values_beyond_what_the_device_bears_count_as_the_last_that_it_does() -> None:
    floats, ints = neutral_columns(1)
    huge = SamplingParams(temperature=1e300, repetition_penalty=1e-300, top_k=2**40)
    write_row(floats[0], ints[0], huge)
    columns = by_name(floats, ints)
    assert columns["temperature"][0] == np.float32(1e30)
    assert columns["repetition_penalty"][0] == np.float32(1e-30)
    assert columns["top_k"][0] == 2**31 - 1
    assert RowValue("int32", lowest=0).clip(-1) == 0


MISSPELT = """
import jax
from enginebay import SamplingParams
from enginebay.contracts.sampler import SamplingState

SamplingParams(min_p=0.1, stop=".", stop_token_ids=[1])
SamplingParams(min_pp=0.1)
SamplingParams(min_p="a")

def read(params: SamplingParams, state: SamplingState) -> jax.Array:
    params.top_pp
    params.stop = "."
    return state.params.top_p + state.params.top_q
"""


@pytest.mark.slow
def test_a_type_checker_refuses_a_misspelt_parameter(tmp_path: Path) -> None:
    source = tmp_path / "misspelt.py"
    source.write_text(MISSPELT, encoding="utf-8")
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*mypy, "--cache-dir", str(ROOT / ".mypy_cache"), str(source)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    errors = [
        line.rpartition("  [")[0].partition("error: ")[2] for line in done.stdout.splitlines()
    ]
    assert [error.partition(";")[0] for error in errors if error] == [
        'Unexpected keyword argument "min_pp" for "SamplingParams"',
        'Argument "min_p" to "SamplingParams" has incompatible type "str"',
        '"SamplingParams" has no attribute "top_pp"',
        '"DeviceParams" has no attribute "top_q"',
    ]
