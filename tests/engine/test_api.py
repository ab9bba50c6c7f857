"""The engine's interface: which classes satisfy it, and the cost of its import."""

from __future__ import annotations

import pytest

from tests.run_tools import printed

SATISFIES = """
import inspect
from harness.engine.api import Engine
from harness.engine.pipeline import PipelineEngine
from harness.engine.zero import ZeroEngine

members = [name for name in vars(Engine) if not name.startswith("_")]
in_init = {"plan", "device"}
for engine in (ZeroEngine, PipelineEngine):
    for name in members:
        if name in in_init:
            assert f"self.{name}" in inspect.getsource(ZeroEngine.__init__), name
            continue
        asked, given = getattr(Engine, name), getattr(engine, name)
        assert type(asked) is type(given), name
        if callable(asked):
            assert [*inspect.signature(asked).parameters.values()] == [
                *inspect.signature(given).parameters.values()
            ], name
print(len(members))
"""


@pytest.mark.gate("engine")
def test_the_interface_is_known_without_deepspeed() -> None:
    code = "import harness.engine.api, sys; print('deepspeed' in sys.modules)"
    assert printed(code) == "False\n"


@pytest.mark.gate("engine")
def test_both_engines_have_every_member_as_it_is_declared() -> None:
    """mypy checks the types: Run.engine is an Engine, and gets the result of build_engine."""
    assert int(printed(SATISFIES).splitlines()[-1]) <= 24
