from __future__ import annotations

import pickle

from harness.errors import ConfigError, ExitCode


def test_one_problem_is_its_own_report():
    assert str(ConfigError("lr is nan")) == "lr is nan"


def test_several_problems_are_numbered():
    error = ConfigError(["lr is nan", "steps is -1"])
    assert str(error).splitlines() == ["2 problems:", "  1. lr is nan", "  2. steps is -1"]
    assert error.code == ExitCode.BAD_CONFIG == 2


def test_survives_the_way_to_another_process():
    problems = ["lr is nan", "steps is -1"]
    assert pickle.loads(pickle.dumps(ConfigError(problems))).problems == problems
