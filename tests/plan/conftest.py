import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest

from harness.plan import resolve_auto
from tests.plan.plans import Planner

Packages = Callable[..., None]


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planner:
    return Planner(tmp_path_factory.mktemp("models"))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Packages:
    """Return a function that sets the installed packages, as in packages("triton"); at first
    none.
    """
    find, here = importlib.util.find_spec, dict[str, ModuleSpec | None]()

    def have(*names: str, none: bool = False) -> None:
        here.update({name: None if none else ModuleSpec(name, None) for name in names})

    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: here[name] if name in here else find(name, *more),
    )
    return have


@pytest.fixture
def cpu_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the meaning of "auto" on a CPU, which depends on the machine."""
    monkeypatch.setattr(resolve_auto, "cpu_has_bf16", lambda: True)
