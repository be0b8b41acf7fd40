"""The exception tree: exit codes, three-part messages, and the nearest match."""

from __future__ import annotations

import pytest

from enginebay import errors
from enginebay.errors import EnginebayError, InputError, InternalError, UnsupportedError, unknown_name

EVERY_ERROR = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, EnginebayError)]


@pytest.mark.parametrize("error", EVERY_ERROR)
def test_an_error_belongs_to_one_branch_and_its_exit_code_follows(error: type[EnginebayError]) -> None:
    branches = [
        b for b in (InputError, UnsupportedError, InternalError, errors.StoppedError) if issubclass(error, b)
    ]
    assert len(branches) == (0 if error is EnginebayError else 1)
    users_own = issubclass(error, InputError | UnsupportedError)
    assert error.exit_code == (2 if users_own else 1)


def test_wrong_input_is_a_value_error() -> None:
    assert issubclass(InputError, ValueError)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    message = str(unknown_name("scheduler", "fcsf", ["static_batch", "fcfs", "fcfs"]))
    assert message == (
        "unknown scheduler 'fcsf'. Allowed: fcfs, static_batch. Did you mean 'fcfs'? Choose one of these."
    )


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    assert "Did you mean" not in str(unknown_name("engine", "zzz", ["vinference"]))


def test_nothing_installed_is_said() -> None:
    assert "Allowed: none is installed." in str(unknown_name("engine", "x", []))
