"""Files of the user's own code (run.code): what is refused, and what plans take from them."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from harness.config.own import ROWS, loss
from harness.config.run_file import load_run_config
from harness.engine.optimizers import our_optimizer
from harness.engine.state import check_states, set_steps
from harness.errors import ConfigError
from harness.estimate.states import moment_bytes
from harness.layout.attention_table import ATTENTIONS
from harness.layout.optimizer_table import OPTIMIZERS
from harness.models.loss import own_loss
from harness.plan.command import parse_command, plan_from
from harness.plan.plan import Plan
from harness.run.instrument import OwnMetric, own_metrics
from tests.real_runs import REPOSITORY
from tests.tables import beside

TABLES = beside(__file__, "own_code.toml")
CODE = REPOSITORY / "docs" / "own_code.py"
IMPORTS = "from harness.config.own import attention, loss, metric, optimizer, schedule\n"


@pytest.fixture(autouse=True)
def unloaded() -> Iterator[None]:
    yield
    load_run_config(None)
    assert not ROWS


@pytest.fixture
def my(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("my.py")


def planned(code: object, *words: str) -> Plan:
    world = {"DS_ACCELERATOR": "cpu", "WORLD_SIZE": "2", "RANK": "0"}
    return plan_from(parse_command([f"run.code={code}", *words]), world)


@pytest.mark.parametrize(("source", "problem"), TABLES["refused"])
def test_a_file_is_refused_in_one_line(source: str, problem: str, my: Path) -> None:
    my.write_text(IMPORTS + source)
    with pytest.raises(ConfigError) as caught:  # the names that it lacks are no problems
        load_run_config(None, [f"run.code={my}", "train.loss=a"])
    assert caught.value.problems == [f"run.code is 'my.py' (command line): my.py{problem}"]
    assert not ROWS
    assert (ATTENTIONS.keys() | OPTIMIZERS.keys()).isdisjoint({"a"})


@pytest.mark.parametrize("name", TABLES["planned"])
def test_a_plan_with_own_code_is_refused(name: str) -> None:
    words, problem = (text.replace("{code}", str(CODE)) for text in TABLES["planned"][name])
    with pytest.raises(ConfigError) as caught:
        planned(CODE, *words.split())
    assert caught.value.problems == [problem]


@pytest.mark.parametrize("name", TABLES["losses"])
def test_a_trial_refuses_a_loss(name: str, my: Path) -> None:
    body, problem = TABLES["losses"][name]
    my.write_text(f"{IMPORTS}@loss('a')\ndef f(logits, labels, scale):\n    {body}\n")
    with pytest.raises(ConfigError, match=r"^own\.scale is missing: my\.py:2: loss 'a' needs it$"):
        planned(my, "train.loss=a")
    plan = planned(my, "train.loss=a", "own.scale=2", "model.loss_chunk=0")
    with pytest.raises(ConfigError) as caught:
        own_loss(plan)
    assert str(caught.value).startswith(f"my.py{problem}")


def test_what_functions_return_is_checked(my: Path) -> None:
    my.write_text(
        f"{IMPORTS}import torch\n"
        "@optimizer('a', state_bytes=0)\ndef f(groups, lr, weight_decay): return groups\n"
        "@optimizer('b', state_bytes=4)\ndef g(groups, lr, weight_decay):\n"
        "    return torch.optim.Adagrad(groups, lr)\n"
        "@metric('c')\nclass C: ...\n@schedule('d')\ndef d(progress): return 2 * progress\n"
        "@optimizer('e', state_bytes=0, layouts='whole')\ndef e(groups, lr, weight_decay): ...\n"
    )
    parameter = torch.nn.Parameter(torch.zeros(2))
    for name, problem in (
        ("a", "my.py:3: optimizer 'a' returns a list, not a torch.optim.Optimizer"),
        ("b", "my.py:5: optimizer 'b' creates states when it is made, but ZeRO"),
    ):
        make = our_optimizer(planned(my, f"optim.name={name}"))
        with pytest.raises(ConfigError, match=f"^{problem}"):
            make([{"params": [parameter]}])
    with pytest.raises(
        ConfigError, match=r"^my\.py:10: schedule 'd' returns 2\.0 at progress 1\.0"
    ):
        planned(my, "optim.schedule=d")
    with pytest.raises(ConfigError, match=r"^my\.py:8: metric 'c' is a class, but not of harness"):
        [*own_metrics({})]
    for value in ("text", torch.zeros(2)):
        row = mock.Mock(**{"bound.return_value": mock.Mock(return_value=value)})
        (metric := OwnMetric(row, {})).begin(None)
        with pytest.raises(ConfigError, match="not a number or a scalar tensor"):
            metric.values(mock.Mock())
    with pytest.raises(ConfigError, match="whole matrices, but ZeRO 1"):
        planned(my, "optim.name=e")


def test_checkpoints_hold_what_torchs_optimizers_keep() -> None:
    """They count steps in tensors, in which a resumed run goes on; NAdam keeps a product, too."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    lost = torch.optim.NAdam([parameter])
    lost.step()
    for kept in (torch.optim.RAdam([parameter]), torch.optim.Adafactor([parameter])):
        kept.step()
        set_steps(kept, 7)
        kept.step()
        assert torch.equal(kept.state[parameter]["step"], torch.tensor(8.0))
        check_states(SimpleNamespace(optimizer=kept))
    with pytest.raises(ConfigError, match="its optimizer keeps 'mu_product', but a checkpoint"):
        check_states(SimpleNamespace(optimizer=lost))


def test_a_plan_takes_what_the_decorators_say() -> None:
    words = ("optim.name=plain_sgd", "train.loss=tempered", "own.temperature=2")
    plan, sdpa = (
        planned(CODE, *words, f"model.attention={name}") for name in ("written_out", "sdpa")
    )
    assert plan.estimate
    assert sdpa.estimate
    assert moment_bytes(plan.estimate.inputs) == 4
    assert plan.estimate.worst.peak > sdpa.estimate.worst.peak  # it keeps its scores
    assert plan.loss_chunk == plan.settled["model.loss_chunk"] == 0
    assert plan.code == sdpa.code
    assert [*plan.code["adds"]] == [f"{kind} {name}" for kind, name in ROWS]


def test_the_decorators_do_nothing_in_another_program() -> None:
    function = loss("a")(len)
    assert function is len
    assert not ROWS
