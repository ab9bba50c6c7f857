"""Mixtures of sources, and separate held-out sets, through build_data."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.config.run_config import RunConfig
from harness.config.run_file import load_run_config
from harness.data.build import cached_fingerprint
from harness.data.run_tokenizer import build_tokenizer
from harness.data.spec import DataSpec
from harness.errors import ConfigError
from tests.data.conftest import Opened, Written
from tests.tables import beside

WORDS = "the model reads a text and learns which word follows another".split()  # noqa: SIM905


Mix = Callable[..., str]


@pytest.fixture
def sources(write_jsonl: Written) -> dict[str, Path]:
    """Return texts, short texts and pairs that differ in their first word."""
    draw = random.Random(0)

    def text(first: str, most: int) -> str:
        return " ".join([first, *(draw.choice(WORDS) for _ in range(draw.randrange(4, most)))])

    texts = {name: [text(name, 60) for _ in range(80)] for name in ("long", "other")}
    rows = {name: [{"text": line} for line in lines] for name, lines in texts.items()}
    paths = {name: write_jsonl(*rows[name], name=f"{name}.jsonl") for name in rows}
    pairs = [{"prompt": text("pairs", 9), "completion": text("so", 7)} for _ in range(60)]
    return {**paths, "pairs": write_jsonl(*pairs, name="pairs.jsonl")}


@pytest.fixture
def spec_of_run(spec_of_run: Callable[..., DataSpec]) -> Callable[..., DataSpec]:
    return partial(spec_of_run, "data.seq_len=24")


@pytest.fixture
def mix(sources: dict[str, Path]) -> Callable[..., str]:
    """Return a function for the argument of some sources, with each one's settings in TOML."""

    def argument(**settings: str) -> str:
        entries = [f'{{path="{sources[name]}", {text}}}' for name, text in settings.items()]
        return f"data.mix=[{', '.join(entries)}]"

    return argument


def test_samples_are_those_of_the_sources_in_their_shares(opened_run: Opened, mix: Mix) -> None:
    """Each source is packed according to its own data."""
    argument = mix(long="share=0.5", other="share=0.3", pairs="share=0.2")
    mixed = opened_run(argument)
    stream = mixed.train
    assert mixed.names == ["long", "other", "pairs"]
    assert mixed.mixture() == [[0, [5, 3, 2]]]
    assert mixed.shares(200)[0].startswith("long: 50.00% of the windows, ")
    read = [0, 0, 0]
    for index in range(100):
        sample = stream.sample(index)
        alone = stream.streams[sample.source].sample(read[sample.source])
        assert torch.equal(sample.batch.input_ids, alone.batch.input_ids)
        assert (sample.window, sample.spans) == (alone.window, alone.spans)
        read[sample.source] += 1
    assert read == [50, 30, 20]
    assert [s.holds_whole_documents for s in stream.streams] == [False, False, True]
    assert stream.holds_whole_documents
    assert stream.document_mask  # for all of them, since prompts are masked in one


def test_the_fingerprint_is_that_of_all_sources(
    opened_run: Opened, spec_of_run: Callable[..., DataSpec], mix: Mix, write_jsonl: Written
) -> None:
    both = mix(long="share=1", pairs="share=1")
    assert cached_fingerprint(spec_of_run(both)) is None
    first = opened_run(both).fingerprint
    assert cached_fingerprint(spec_of_run(both)) == first
    assert opened_run(mix(long="share=1", pairs="share=2")).fingerprint == first
    assert opened_run(mix(long="share=1", other="share=1")).fingerprint != first
    write_jsonl(*({"text": f"{n} else"} for n in range(99)), name="long.jsonl")
    assert opened_run(both).fingerprint != first


def test_sizes_are_the_shares_without_any(opened_run: Opened, mix: Mix) -> None:
    def drawn(*words: str) -> list[float]:
        argument = mix(long='format="jsonl"', pairs='name="b"')
        data = opened_run(argument, *words)
        sizes = [stream.samples for stream in data.train.streams]
        pairs = zip(data.train.order.drawn_before(10**6), sizes, strict=True)
        return [count / 10**6 / (size / sum(sizes)) for count, size in pairs]

    assert drawn() == pytest.approx([1, 1], abs=1e-4)
    flat = drawn("data.mix_temperature=4")
    assert flat[0] < 1 < flat[1]
    by_tokens = drawn("data.mix_by=tokens")
    assert by_tokens == pytest.approx([1, 1], abs=1e-4)


def test_shares_of_tokens_leave_out_padding(opened_run: Opened, mix: Mix) -> None:
    argument = mix(long="share=0.5", pairs="share=0.5")
    data = opened_run(argument, "data.mix_by=tokens", "data.seq_len=40")
    counts = data.train.order.drawn_before(10**6)
    per_sample = [s.lengths(torch.arange(s.samples).numpy()).mean() for s in data.train.streams]
    assert per_sample[0] == 40 > per_sample[1]
    read = [float(count * each) for count, each in zip(counts, per_sample, strict=True)]
    assert read[0] == pytest.approx(read[1], rel=1e-3)


def test_shares_change_during_the_run(opened_run: Opened, mix: Mix) -> None:
    argument = mix(long="share=0.9, then=0.5", other="share=0.1, then=0.5")
    sizes = ("train.global_batch=10", "train.steps=50")
    for until, batching in (("0.8", "packed"), ("40", "length_grouped")):
        data = opened_run(argument, *sizes, f"data.mix_until={until}", f"data.batching={batching}")
        assert data.mixture() == [[0, [9, 1]], [400, [1, 1]]]
        assert data.train.batch(0, 400).sources.bincount().tolist() == [360, 40]
        assert getattr(data.held_out, "base", data.held_out).order.parts[0].weights == (9, 1)
        epochs = 90 / data._ordered.streams[1].samples
        assert data.shares(500)[1] == f"other: 18.00% of the windows, {epochs:.2f} epochs"


def test_a_source_is_read_for_its_epochs_at_most(opened_run: Opened, mix: Mix) -> None:
    argument = mix(long="share=0.5, epochs=1.5", other="share=0.5")
    data = opened_run(argument)
    assert data.train.length is None
    long = data.train.streams[0].samples
    assert data.train.order.drawn_before(10**6)[0] == int(1.5 * long)
    argument = mix(long="epochs=1", other="epochs=1")
    data = opened_run(argument)
    assert data.train.length == data.train.samples
    with pytest.raises(ConfigError, match="its sources run out after"):
        data.train.batch(data.train.samples - 1, 2)


def test_held_out_sets_replace_the_split(opened_run: Opened, sources: dict[str, Path]) -> None:
    path = f"data.path={sources['long']}"
    split, single = opened_run(path), opened_run(path, f"data.eval_path={sources['other']}")
    assert single.train.tokens == split.train.tokens + split.held_out.tokens
    assert single.fingerprint == split.fingerprint
    other = opened_run(f"data.path={sources['other']}", "data.held_out=0.3")
    assert single.held_out.tokens == other.train.tokens + other.held_out.tokens
    assert single.eval_sets == {}
    sets = f'{{pairs="{sources["pairs"]}", other="{sources["other"]}"}}'
    named = opened_run(path, f"data.eval_path={sets}")
    assert [*named.eval_sets] == ["pairs", "other"]
    assert named.held_out is named.eval_sets["pairs"]
    masked = {name: stream.document_mask for name, stream in named.eval_sets.items()}
    assert masked == {"pairs": True, "other": False}
    assert named.document_mask
    assert not named.train.document_mask  # held-out sets do not change what training computes
    of_set = named.eval_sets["other"].batch(0, 3).input_ids
    assert torch.equal(of_set, single.held_out.batch(0, 3).input_ids)
    assert named.summary()[1].startswith("held-out set pairs: ")


@pytest.mark.parametrize(("one", "other", "overlap"), beside(__file__, "mixture.toml")["overlaps"])
def test_sources_that_overlap_hold_out_the_same_documents(
    opened_run: Opened, write_jsonl: Written, tmp_path: Path, one: str, other: str, overlap: bool
) -> None:
    rows = [{"text": "a text " * 9, "l": ["de", "en"][n % 3 > 0], "n": n % 2} for n in range(200)]
    folder = tmp_path / "d"
    folder.mkdir()
    for name in "ab":
        write_jsonl(*rows, name=f"d/{name}.jsonl")
    mix, apart = f"data.mix=[{one}, {other}]", f"data.eval_path={folder}/b.jsonl"
    mix = mix.replace('path="d', f'path="{folder}')
    if overlap:
        with pytest.raises(ConfigError, match="would train on documents that the other holds out"):
            opened_run(mix)
    assert len(opened_run(mix, *([apart] if overlap else [])).sources) == 2


def test_tokenizer_learns_all_sources(sources: dict[str, Path], mix: Mix, tmp_path: Path) -> None:
    words = [f"data.cache_dir={tmp_path / 'cache'}", f"data.eval_path={sources['pairs']}"]
    both, alone = (
        build_tokenizer(DataSpec.of_run(load_run_config(None, [*words, argument]), {}), print)
        for argument in (mix(long="share=1", pairs="share=1"), f"data.path={sources['long']}")
    )
    assert any("pairs" in piece for piece in both.get_vocab())
    assert not any("pairs" in piece for piece in alone.get_vocab())


def test_all_unreadable_sources_are_named_at_once(opened_run: Opened, tmp_path: Path) -> None:
    argument = f'data.mix=[{{path="{tmp_path}/a"}}, {{path="{tmp_path}/b"}}]'
    with pytest.raises(ConfigError) as caught:
        opened_run(argument, f"data.eval_path={tmp_path}/c")
    for name, problem in zip("abc", caught.value.problems, strict=True):
        assert f"{tmp_path}/{name} does not exist" in problem


def test_a_recorded_mixture_is_read_again() -> None:
    argument = 'data.mix=[{path="a", share=1}, {path="b", share=2, epochs=3, name="c"}]'
    run = load_run_config(None, [argument, 'data.eval_path={x="y"}'])
    assert RunConfig.model_validate(run.model_dump(mode="json")).data == run.data
    assert [*run.data.sources()] == ["a", "c"]
