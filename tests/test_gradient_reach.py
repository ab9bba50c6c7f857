"""tools/gradient_reach.py: distances that gradients reach, its output, its refusals."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.models import recurrent
from harness.models.skeleton import hf_config
from tests.data.chat_tokenizers import tokenizer_of
from tests.engine.small import MODEL
from tests.run_tools import run_tool
from tests.tables import beside
from tools.gradient_reach import gradient_norms

WINDOWED = {**MODEL, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def test_nothing_is_reached_beyond_the_windows_of_all_layers() -> None:
    torch.manual_seed(0)
    config = hf_config({**WINDOWED, "sliding_window": 5, "num_hidden_layers": 2})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    norms = gradient_norms(model, torch.randint(MODEL["vocab_size"], (25,)))
    assert len(norms) == 24
    assert all(norm > 0 for norm in norms[:9])  # each layer reads four earlier tokens
    assert not any(norms[9:])


def test_a_norm_is_that_of_the_loss_of_the_last_token() -> None:
    """Compared with a difference quotient along the gradient of one embedding."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(MODEL)).double().eval()
    ids = torch.arange(3, 13)
    norms = gradient_norms(model, ids)
    embedded = model.get_input_embeddings()(ids[None, :-1]).detach().requires_grad_()

    def loss(embeddings: torch.Tensor) -> torch.Tensor:
        logits = model(inputs_embeds=embeddings).logits[0, -1]
        return torch.nn.functional.cross_entropy(logits, ids[-1])

    (gradient,) = torch.autograd.grad(loss(embedded), embedded)
    direction = torch.zeros_like(gradient)
    direction[0, 4] = gradient[0, 4] / gradient[0, 4].norm()
    slope = (loss(embedded + 1e-4 * direction) - loss(embedded - 1e-4 * direction)) / 2e-4
    assert norms[len(norms) - 1 - 4] == pytest.approx(float(slope), rel=1e-3)  # norms are fp32


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a GRU with random weights, in the form of an export."""
    recurrent.register()
    folder = tmp_path_factory.mktemp("gru")
    tokenizer = tokenizer_of("chatml")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": len(tokenizer)}
    config = hf_config({"model_type": "recurrent", "cell": "gru", **sizes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.gate("tools")
def test_the_gradients_of_a_random_gru_vanish(exported: Path, tmp_path: Path) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "reach.svg"
    text.write_text("one two three four five six seven. " * 40)
    words = (exported, "--text", text, "--tokens=64", "--windows=3", "--plot", picture)
    rows = re.findall(r"^ *([\d,]+) +(\d\S+)$", run_tool("gradient_reach", *words).stdout, re.M)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64"]
    norms = [float(row[1]) for row in rows]
    assert norms == sorted(norms, reverse=True)
    assert norms[-1] < 1e-6 * norms[0]
    assert "How far back" in picture.read_text()


@pytest.mark.gate("tools")
@pytest.mark.parametrize(("words", "message"), beside(__file__, "gradient_reach.toml")["wrong"])
def test_wrong_arguments_are_named(
    words: tuple[str, ...], message: str, exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("short text")
    refused = run_tool("gradient_reach", exported, "--text", tmp_path / "text.txt", *words, code=2)
    assert message in " ".join(refused.stderr.split())
