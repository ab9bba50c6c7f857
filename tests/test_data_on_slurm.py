"""Cleaning and tokenizing on a real Slurm of two nodes write the same bytes as here."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.data.shards import shards_of
from tests.private_slurm import PrivateSlurm
from tests.real_runs import REPOSITORY
from tests.test_clean_data import prose, tree
from tools.clean_data import main as clean
from tools.tokenize_data import main as tokenize

pytestmark = pytest.mark.gate("slurm")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a corpus that is large enough for two tasks."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f'{{"text": "{prose(seed % 4000, 25)}"}}\n' for seed in range(6000)]
    (folder / "corpus.jsonl").write_text("".join(texts))
    return folder / "corpus.jsonl"


def test_clean_data_runs_on_slurm(slurm: PrivateSlurm, corpus: Path, tmp_path: Path) -> None:
    words = [str(corpus), str(tmp_path / "there"), "near_duplicates.num_buckets=3"]
    command = [sys.executable, "tools/clean_data.py", *words, "--slurm", "slurm.mem_per_cpu_gb=1"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=slurm.env, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "submitted 6 arrays" in done.stdout
    assert clean([str(corpus), str(tmp_path / "here"), *words[2:]]) == 0
    assert tree(tmp_path / "there") == tree(tmp_path / "here")


def test_tokenize_data_runs_on_slurm(slurm: PrivateSlurm, corpus: Path, tmp_path: Path) -> None:
    from harness.files.corpus import find_corpus

    assert len(shards_of(find_corpus(str(corpus)))) >= 2
    asked = [f"data.path={corpus}", "data.vocab_size=400", f"data.cache_dir={tmp_path}/cache"]
    script = REPOSITORY / "slurm" / "tokenize.sbatch"
    words = ("--array=0-1", script, *asked, "--workers=1")
    job = slurm.submit(tmp_path, *words, f"--out={tmp_path}/there", cwd=REPOSITORY)
    job.codes(900)
    assert "6,000 documents" in job.output, job.output
    assert tokenize([*asked, f"--out={tmp_path}/here"]) == 0
    for suffix in (".bin", ".idx"):
        there, here = (tmp_path / f"{name}{suffix}" for name in ("there", "here"))
        assert there.read_bytes() == here.read_bytes()
