"""Features of runs, each with `key=value` words, and the layouts in which they are trained."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint.store import Store
from harness.launch.fork_server import Zygote
from harness.runfolder import RunFolder
from tests.data.chat_tokenizers import tokenizer_of, write_chats
from tests.gates.models import LEARNED
from tests.real_runs import REPOSITORY, SHORT_RUN, SMALL_MODEL
from tests.tables import beside

PHRASE = "the model reads a question and answers it in a word or two".split()  # noqa: SIM905


@dataclass(frozen=True)
class Layout:
    """A JSON of ds_configs/, its ranks, additional words, and text that its ranks must report."""

    json: str
    ranks: int = 2
    words: Sequence[str] = ()
    zero_stage: int = 0
    stages: int = 1
    is_verified: bool = False


LAYOUTS = {name: Layout(**row) for name, row in beside(__file__, "layouts.toml").items()}

_SMALL = " ".join(SMALL_MODEL)


@dataclass(frozen=True)
class Feature:
    """A feature to train, and the verbs that apply to it.

    A run of `steps` steps has a checkpoint after `stop` of them. `alike` are layouts that learn the
    same from the start; `others` resume the checkpoint. Each may be followed by more words. Those
    with a + are in `make test`, as are the verbs in `now`; the rest are in the gate.
    """

    words: str = ""
    layout: str = "zero1"
    alike: str = ""
    others: str = ""
    now: str = ""
    data: str = "text"
    model: str | dict[str, Any] = _SMALL
    steps: int = 4
    stop: int = 2
    is_random: bool = False  # each layout drops other values
    resumed_with: str = ""  # words that do not change the result
    loss_rounding: float = 1e-5  # relative difference between layouts
    norm_rounding: float = 1e-5

    def cells(self, verb: str) -> list[tuple[str, bool]]:
        """Return the layouts to which a verb applies, and whether they are in `make test`."""
        if verb == "trains":
            return [(self.layout, bool(self.now) or "+" in self.alike + self.others)]
        if verb in ("resumes", "exports"):
            return [(self.layout, verb in self.now.split())]
        layouts = (self.alike if verb == "alike" else self.others).split(", ")
        return [(layout.lstrip("+"), layout.startswith("+")) for layout in layouts if layout]


FEATURES = {name: Feature(**row) for name, row in beside(__file__, "features.toml").items()}
FEATURES["experts"] = Feature(
    layout="experts",
    others="+zero3",
    now="exports",
    model={**LEARNED["mixtral"], "vocab_size": 512},
)


def in_gate(*values: object) -> Any:
    """Return parameters of a test that only the gate runs."""
    return pytest.param(*values, marks=pytest.mark.gate("runs"))


def sentence(draw: random.Random, fewest: int, most: int) -> str:
    """Return words of PHRASE in random order, at least `fewest` and fewer than `most`."""
    return " ".join(draw.choice(PHRASE) for _ in range(draw.randrange(fewest, most)))


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def _skewed(folder: Path) -> list[str]:
    """Write documents of skewed lengths; return their words."""
    draw = random.Random(0)
    counts = [int(draw.lognormvariate(2, 0.8)) + 2 for _ in range(200)]
    texts = [{"text": sentence(draw, count, count + 1)} for count in counts]
    return [f"data.path={write_lines(folder / 'skewed.jsonl', texts)}"]


def _mixture(folder: Path) -> list[str]:
    """Write text and pairs with two held-out sets; return their words."""
    draw = random.Random(0)
    texts = [{"text": sentence(draw, 3, 60)} for _ in range(150)]
    pairs = [{"prompt": sentence(draw, 3, 9), "completion": sentence(draw, 3, 9)} for _ in texts]
    held_out = [{"text": sentence(draw, 3, 40)} for _ in range(40)]
    named = {"texts": texts, "pairs": pairs * 2, "held": held_out}
    paths = {name: write_lines(folder / f"{name}.jsonl", lines) for name, lines in named.items()}
    sources = (
        f'{{path="{paths["texts"]}", share=0.7, then=0.2}}, '
        f'{{path="{paths["pairs"]}", share=0.3, then=0.8}}'
    )
    sets = f'{{held="{paths["held"]}", own="{paths["pairs"]}"}}'
    return [f"data.mix=[{sources}]", f"data.eval_path={sets}"]


def _chats(folder: Path) -> list[str]:
    """Write conversations with tool calls, and a tokenizer without a template."""
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "tokenizer")
    write_chats(folder / "chats.jsonl", 60, tools=True)
    return [f"data.path={folder / 'chats.jsonl'}", f"data.tokenizer={folder / 'tokenizer'}"]


def _numbers(folder: Path) -> list[str]:
    texts = [{"text": f"{n} is a number " * 9} for n in range(99)]
    return [f"data.path={write_lines(folder / 'numbers.jsonl', texts)}"]


def _preferences(folder: Path) -> list[str]:
    """Write pairs of a short and a long answer, and a tokenizer with a template."""
    tokenizer_of("llama3").save_pretrained(folder / "tokenizer")
    draw = random.Random(0)
    pairs = [
        {
            "prompt": sentence(draw, 3, 9),
            "chosen": sentence(draw, 2, 5),
            "rejected": sentence(draw, 5, 12),
        }
        for _ in range(80)
    ]
    path = write_lines(folder / "preferences.jsonl", pairs)
    return [f"data.path={path}", f"data.tokenizer={folder / 'tokenizer'}"]


CORPORA: dict[str, Callable[[Path], list[str]]] = {
    "skewed": _skewed,
    "mixture": _mixture,
    "chats": _chats,
    "preferences": _preferences,
    "numbers": _numbers,
}


def train(
    zygote: Zygote, layout: str, path: Path, *words: str, ranks: int = 2, code: int = 0
) -> str:
    """Train or resume a short run, which must end with `code`; return all ranks' output."""
    json_path = REPOSITORY / "ds_configs" / f"{layout}.json"
    arguments = [f"--deepspeed={json_path}", *SHORT_RUN, *words, f"run.dir={path}"]
    ended = zygote.run(arguments, path.with_name(f"{path.name}-logs"), ranks=ranks)
    assert ended.codes == [code] * ranks, ended.output
    return ended.output


@dataclass
class Runs:
    """Runs of features. Each is made once, and copied by tests that resume it."""

    zygote: Zygote
    folder: Path
    text: list[str]
    _whole: dict[tuple[str, str], RunFolder] = field(default_factory=dict)
    _words: dict[str, list[str]] = field(default_factory=dict)

    def whole(self, name: str, layout: str | None = None) -> RunFolder:
        """Return an uninterrupted run, in its own layout or another one."""
        key = (name, layout or FEATURES[name].layout)
        if key not in self._whole:
            path = Path(tempfile.mkdtemp(prefix=name.replace(" ", "-"), dir=self.folder)) / "run"
            self.train(name, key[1], path)
            self._whole[key] = RunFolder(path)
        return self._whole[key]

    def resumed(
        self, name: str, layout: str, path: Path, *more: str, whole: RunFolder | None = None
    ) -> RunFolder:
        """Return a copy of the whole run as it was at its stop, resumed in a layout."""
        feature = FEATURES[name]
        shutil.copytree((whole or self.whole(name)).path, path)
        store = Store(path / "checkpoints")
        for checkpoint in store.all():
            if checkpoint != store.at(feature.stop):
                shutil.rmtree(checkpoint)
        self.train(name, layout, path, *more)
        return RunFolder(path)

    def train(self, name: str, layout: str, path: Path, *more: str, code: int = 0) -> str:
        """Train or resume a run, which must end with `code` on all ranks; return its output."""
        feature = FEATURES[name]
        title, *extra = layout.split(" ") if layout not in LAYOUTS else [layout]
        ds = LAYOUTS[title]
        words = [
            *(f"train.steps={feature.steps}", f"save.every={feature.stop}", "save.keep=9"),
            *("optim.schedule=constant", *self.words(name), *ds.words, *extra, *more),
        ]
        return train(self.zygote, ds.json, path, *words, ranks=ds.ranks, code=code)

    def words(self, name: str) -> list[str]:
        """Return the words of a feature's data, model and settings."""
        if name not in self._words:
            feature = FEATURES[name]
            there = self.folder / f"data-{name.replace(' ', '-')}"
            there.mkdir()
            corpus = CORPORA[feature.data](there) if feature.data in CORPORA else self.text
            cache = [] if corpus is self.text else [f"data.cache_dir={there / 'cache'}"]
            model = feature.model
            if isinstance(model, dict):
                (there / "config.json").write_text(json.dumps(model))
                model = f"model.name={there}"
            words = [*corpus, *cache, *model.split(), *feature.words.split()]
            if any("{base}" in word for word in words):
                base = str(self.whole("plain").path)
                words = [word.replace("{base}", base) for word in words]
            self._words[name] = words
        return self._words[name]
