import errno
import pickle
import shutil

import pytest

from harness.errors import CannotSave, ConfigError, ExitCode, is_full_disk


def test_config_error_numbers_problems_and_survives_pickling():
    problems = ["lr is nan", "steps is -1"]
    error = pickle.loads(pickle.dumps(ConfigError(problems)))
    assert error.problems == problems
    assert str(error).splitlines() == ["2 problems:", "  1. lr is nan", "  2. steps is -1"]
    assert error.code == ExitCode.BAD_CONFIG == 2
    assert str(ConfigError("lr is nan")) == "lr is nan"


FULL = [
    *(OSError(n, "x") for n in (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG)),
    Exception("No space left on device (os error 28)"),  # from tokenizers
    shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")]),
    CannotSave("anything"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_known_by_its_number_or_its_text(error: Exception) -> None:
    assert is_full_disk(error)
    outer = RuntimeError("the writer failed")
    outer.__cause__ = error
    assert is_full_disk(outer)


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), RuntimeError("Connection closed")])
def test_other_errors_are_no_full_disk(error: Exception) -> None:
    assert not is_full_disk(error)
