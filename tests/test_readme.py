"""Every command of the README and of its pages runs outside a copy that was never installed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.launch.ranks import free_port
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from harness.run.dry_run import dry_run
from tests.real_runs import TRAIN, run_ranks
from tests.run_tools import run_tool
from tests.tables import beside

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
WRITTEN = (  # by hand; the other pages are generated, or have no commands
    "layouts configs data cleaning models runs slurm export performance planner seeing"
    " troubleshooting long_sequences course"
)
PAGES = README + "".join((ROOT / f"docs/{name}.md").read_text() for name in WRITTEN.split())


def commands_of(text: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = (line.partition("#")[0].strip() for block in blocks for line in block.splitlines())
    return [*dict.fromkeys(lines)]


def program_of(command: str) -> str:
    """Return the launcher or the script of a command."""
    program, *words = command.split()
    return words[0] if program == "python" else program


COMMANDS = commands_of(PAGES)
# Each launcher and each tool runs once as it is written. The others find everything imported.
FIRST = {program_of(command): command for command in reversed(COMMANDS)}
# A model and a run so small that only the command itself takes time.
SHRUNK = shlex.split(
    "model.overrides.num_hidden_layers=1 model.overrides.hidden_size=96"
    " model.overrides.intermediate_size=64 data.seq_len=16 train.global_batch=4 eval.samples=4"
    " model.overrides.vocab_size=8192 sample.tokens=2"
)
INSTEAD = beside(__file__, "readme.toml")
# runs/first has this many steps before any command; two commands resume it.
FIRST_STEPS = 2
STEPS = {"train.steps=200": 3, "train.steps=300": 4}


def files() -> list[str]:
    """Return this checkout's tracked and new files."""
    names = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(names, cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the README's data, with a copy of this checkout in `clone`."""
    there = tmp_path_factory.mktemp("outside")
    for name in files():
        if (ROOT / name).is_file():
            (there / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, there / "clone" / name)
    text = (ROOT / "README.md").read_text()
    (there / "texts").mkdir()
    for number in range(20):
        (there / "texts" / f"{number}.txt").write_text(f"{number} {text}")
    lines = [json.dumps({"text": f"{number} {text}"}) for number in range(20)]
    (there / "corpus.jsonl").write_text("\n".join(lines))
    (there / "code.txt").write_text(text)
    sums = {f"what is {n} plus {n}?": 2 * n for n in range(200)}
    rows = "".join(f"{question}, {number}\n" for question, number in sums.items())
    (there / "questions.csv").write_text(f"question,answer\n{rows}")
    pairs, chats = [], []
    for question, number in sums.items():
        language = ("en", "de")[number // 2 % 2]
        pair = {"prompt": question, "completion": f" {number}, in words " * 4}
        pairs.append(json.dumps({**pair, "language": language}))
        answer = {"role": "assistant", "content": f"it is {number}, in words"}
        chats.append(json.dumps({"messages": [{"role": "user", "content": question}, answer]}))
    (there / "chats.jsonl").write_text("\n".join(chats))
    (there / "pairs.jsonl").write_text("\n".join(pairs))
    return there


def run(command: str, outside: Path) -> None:
    """Run one command outside the clone with small settings on CPU ranks; it must end with 0."""
    is_first = command in FIRST.values()
    for start, other in INSTEAD.items():
        if command.startswith(start):
            extends = "train.py" in start or other.startswith(start)
            command = command.replace(start, other) if extends else other
    words = shlex.split(command)
    if "--dry-run" in words:  # of the settings as written; runs/first has small ones
        words = [word.replace("runs/first", "runs/planned") for word in words]
    elif "harness/train.py" in words:
        steps = next((n for asked, n in STEPS.items() if asked in words), FIRST_STEPS)
        words = [word.replace("@200", f"@{FIRST_STEPS}") for word in words]
        shrunk = [word for word in SHRUNK if "chats" not in command or "seq_len" not in word]
        words += [*shrunk, f"train.steps={steps}", f"data.cache_dir={outside / 'cache'}"]
        stages = 2 if "pipeline2.json" in command or "3d.json" in command else 1
        divided = "tensor2_zero1.json" in command or "sequence_parallel_size=2" in command
        ranks = 4 if "3d.json" in command else 2 if divided else stages
        words.append(f"model.overrides.num_hidden_layers={stages}")
        script = words.index("harness/train.py")
        if not is_first:
            run_ranks([sys.executable, TRAIN, *words[script + 1 :]], outside, ranks).succeeded()
            return
        if words[0] == "torchrun":
            words[1:3] = ["--nproc-per-node", "1", "--master-port", str(free_port())]
        if words[0] == "deepspeed":
            words[1:script] = ["--num_accelerators", str(ranks), "--master_port", str(free_port())]
    if "tools/find_lr.py" in words:
        words += [*SHRUNK, "--steps", "20", f"data.cache_dir={outside / 'cache'}"]
    if words[1].startswith("tools/") and not is_first:
        run_tool(Path(words[1]).stem, *words[2:], cwd=outside)
        return
    cwd = outside / "clone"
    if words[0] != "make" and "-m" not in words:  # the shipped configs are found by name
        cwd, ours = outside, ("harness/", "tools/", "slurm/")
        words = [f"clone/{word}" if word.startswith(ours) else word for word in words]
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def first_run(outside: Path) -> None:
    """Create runs/first, which several commands use, and the model folder and tokens."""
    if (outside / "runs/first/export").exists():
        return
    run("python harness/train.py --deepspeed ds_configs/zero1.json run.dir=runs/first", outside)
    shutil.copytree(outside / "runs/first/export", outside / "my-model")
    shutil.copytree(outside / "runs/first/export", outside / "my-tokenizer")
    tokens = next((outside / "cache").glob("tokens-*/tokens.bin"))
    for suffix in (".bin", ".idx"):
        shutil.copy(tokens.with_suffix(suffix), outside / f"tokens{suffix}")


@pytest.mark.parametrize(("visible", "is_on_cpu"), [("4,5", False), ("4", True)])
def test_the_demo_takes_visible_gpus_or_none(visible: str, is_on_cpu: bool) -> None:
    command = ["make", "-n", "demo", f"VENV={sys.prefix}"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    out = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True)
    assert ("DS_ACCELERATOR=cpu" in out.stdout) == is_on_cpu
    assert "torchrun" in out.stdout  # deepspeed --num_accelerators ignores the variable


def test_the_readme_is_for_a_newcomer() -> None:
    assert len(README.splitlines()) <= 150
    assert README.index("make demo") < README.index("make test") < 1500
    assert len(COMMANDS) >= 30


def test_no_link_leads_nowhere() -> None:
    lost = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for path, anchor in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                lost.append(f"{page.name}: {path}#{anchor}")
    assert lost == []


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_no_page_names_a_file_that_is_not_there() -> None:
    """The changelog may, since it describes the past."""
    lost = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        folders = "harness|tools|tests|slurm|ds_configs"
        named = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text())
        lost += [f"{page.name}: {path}" for path in named if not (ROOT / path).exists()]
    layout = (ROOT / "CONTRIBUTING.md").read_text().partition("## Repository layout")[2]
    named = re.findall(r"(?<![*\w])\w+\.(?:py|toml|sbatch)\b", layout)
    lost += sorted({*named} - {Path(name).name for name in files()})
    assert lost == []


@pytest.mark.gate("tools")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_runs(command: str, outside: Path) -> None:
    first_run(outside)
    if command.startswith("python tools/compare_tokenizers.py"):  # the other one is trained before
        shutil.copytree(outside / "my-tokenizer", outside / "my-unigram", dirs_exist_ok=True)
    run(command, outside)


@pytest.mark.gate("tools")
def test_the_python_of_the_readme_runs(outside: Path) -> None:
    first_run(outside)
    blocks = re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
    blocks = [block for block in blocks if "llama.cpp" not in block]  # the gate gguf has its clone
    each = (
        "import sys\n"
        "for n, block in enumerate(sys.argv[1:]):\n"
        "    exec(compile(block, f'block {n}', 'exec'), {'__name__': '__main__'})"
    )
    command = [sys.executable, "-c", each, *blocks]
    done = subprocess.run(command, cwd=outside, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_make_takes_no_python_that_cannot_install_pip(tmp_path: Path) -> None:
    """Debian's has no ensurepip: `venv` then leaves a folder without pip."""
    for name, lacks in (("python3.12", "ensurepip"), ("python3.11", "")):
        code = f'import sys; sys.modules["{lacks}"] = None; exec(sys.argv[1])'
        (tmp_path / name).write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$2\"\n")
        (tmp_path / name).chmod(0o755)
    words = ["make", "--silent", "--eval=chosen: ; @echo $(PYTHON)", "chosen"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=ROOT, env=path, capture_output=True, text=True)
    assert done.stdout == "python3.11\n", done.stderr


def test_what_the_readme_shows_is_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    cpu = {"DS_ACCELERATOR": "cpu"}
    plan, report, *_ = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    command = parse_command(shlex.split(next(c for c in COMMANDS if "--dry-run" in c))[2:])
    planned = plan_from(command, cpu, command.elsewhere())
    printed = dry_run(planned, elsewhere=True).text().splitlines()
    assert [line for line in plan.splitlines() if line not in printed] == []
    words = re.findall(r"`(train\.step=10\s.*?)`", README, re.DOTALL)[0].split()
    with pytest.raises(ConfigError) as caught:
        plan_from(parse_command(words), cpu)
    assert report == f"cannot train: {caught.value}\n"


def test_the_job_that_is_submitted_can_be_planned() -> None:
    words = next(shlex.split(command) for command in COMMANDS if command.startswith("sbatch"))
    world = World(world_size=64, local_world_size=8, accelerator="cuda", gpu="h100-80")
    job = words[words.index("slurm/train.sbatch") + 1 :]
    assert plan_from(parse_command(job), {}, world).estimate is not None


def test_every_file_is_in_the_tree() -> None:
    """By its name or by its folder's."""
    tree = (ROOT / "CONTRIBUTING.md").read_text().partition("## Repository layout")[2]
    parts = [Path(name).parts for name in files()]
    names = {part[1] for part in parts if part[0] in ("harness", "tools")} - {"__init__.py"}
    patterns = [re.escape(word).replace(r"\*", ".*") for word in re.findall(r"[\w.*]+", tree)]
    assert [name for name in names if not any(re.fullmatch(p, name) for p in patterns)] == []


def test_each_finding_has_a_short_script() -> None:
    text = (ROOT / "docs/deepspeed_findings.md").read_text()
    scripts = re.findall(r"\]\((findings/\d\d\.py)\)", text)
    assert len(scripts) == len(re.findall(r"^## ", text, re.MULTILINE))
    assert sorted(scripts) == [f"findings/{path.name}" for path in _sorted_findings()]
    for script in _sorted_findings():
        compile(script.read_text(), script.name, "exec")
        assert len(script.read_text().splitlines()) <= 25


def _sorted_findings() -> list[Path]:
    return sorted((ROOT / "docs/findings").glob("*.py"))


def test_every_shipped_json_is_in_the_table() -> None:
    for path in (ROOT / "ds_configs").glob("*.json"):
        assert re.search(rf"^\| .*`{path.name}`.* \|", PAGES, re.MULTILINE), path.name
