"""Pose and check the exercises of a course, with numbers of your own.

    python tools/exercise.py                # all exercises, and which you have solved
    python tools/exercise.py 1.1            # the task, with your numbers
    python tools/exercise.py 1.1 37.2 GiB   # check an answer
    python tools/exercise.py --solutions --name ANNA

docs/course.md is the course. Numbers are drawn from your name: --name, the variable STUDENT, or
your login. The functions that plan and train compute every answer, and those of typical mistakes,
so that a wrong answer is told what it missed. It works offline and without a GPU. Exit code 0, 1
for a wrong answer, 2 for text that is no answer.
"""

import argparse
import getpass
import json
import os
import shlex
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.errors import ConfigError, ExitCode
from harness.terminal import command_parser, say
from tools.exercises.posing import AFTERNOONS, EXERCISES, Exercise, as_run, filled, posed

SOLVED = "~/.decoder-harness-course.json"
"""{"anna": ["1.1", "2.3"]}: what each student has solved."""


def main(argv: list[str]) -> int:
    """Run the command: argv -> text on standard output -> exit code."""
    args = _parser().parse_intermixed_args(argv)
    try:
        name = _name(args.name)
        if args.number not in (None, *EXERCISES):
            raise ConfigError(f"there is no exercise {args.number}: they are 1.1 to 4.5")
        if args.forget:
            _keep(name, set(), forget=True)
        elif args.solutions:
            for number in [args.number] if args.number else EXERCISES:
                say(_solution(posed(EXERCISES[number], name), whole=bool(args.number)))
        elif args.number is None:
            say(_listing(name, _solved().get(name.casefold(), [])))
        elif args.answer:
            return _checked(posed(EXERCISES[args.number], name), name, " ".join(args.answer))
        else:
            say(_task(posed(EXERCISES[args.number], name), name, args.name))
    except ConfigError as error:
        say(f"cannot check: {error}", sys.stderr)
        return int(ExitCode.BAD_CONFIG)
    return int(ExitCode.DONE)


def _name(given: str | None) -> str:
    """Return the student's name without spaces. Raises ConfigError for text that is no name."""
    try:
        name = "-".join((given or os.environ.get("STUDENT") or getpass.getuser()).split())
    except (OSError, KeyError):  # a container's user without a name
        name = ""
    if not 0 < len(name) <= 40 or not name.isprintable():
        raise ConfigError(f"--name is {name[:40]!r}: a name has 1 to 40 letters")
    return name


def _listing(name: str, solved: list[str]) -> str:
    lines = [f"The exercises of docs/course.md, {len(solved)} of 20 solved by {name}"]
    for number, exercise in EXERCISES.items():
        afternoon, _, place = number.partition(".")
        lines += ["", f"{afternoon}. {AFTERNOONS[int(afternoon) - 1]}"] * (place == "1")
        lines.append(f"  {number}  {'solved' * (number in solved):6}  {exercise.title}")
    return "\n".join(lines)


def _task(exercise: Exercise, name: str, given: str | None) -> str:
    unit = f" in {exercise.unit}" * bool(exercise.unit)
    kind = f"within {exercise.within:g} %" if exercise.within else "a whole number"
    again = f" --name {shlex.quote(given)}" if given else ""
    answer = f"Answer{unit}, {kind}:\n  {as_run('python tools/exercise.py')} {exercise.number}"
    head = f"{exercise.number} {exercise.title}, with the numbers of {name}"
    return f"{head}\n\n{exercise.text()}\n\n{answer} ANSWER{again}"


def _checked(exercise: Exercise, name: str, answer: str) -> int:
    start = f"{exercise.number} for {name}, "
    if missed := exercise.judge(answer):
        say(filled(f"{start}not right: {'; or: '.join(missed)}"))
        return 1
    say(filled(f"{start}right: {exercise.shown(exercise.truth)}. {exercise.learned}"))
    try:
        ours = _keep(name, {exercise.number})
    except ConfigError as error:
        say(f"not kept: {error}", sys.stderr)
        return int(ExitCode.DONE)
    left = [f"next: {key} {each.title}" for key, each in EXERCISES.items() if key not in ours]
    say(left[0] if left else "All 20 are solved.")
    return int(ExitCode.DONE)


def _solution(exercise: Exercise, whole: bool) -> str:
    line = f"{exercise.number}  {exercise.shown(exercise.truth):22}  {exercise.title}"
    wrong = (f"  {exercise.shown(value)}: {why}" for value, why in exercise.wrong)
    rest = ["", exercise.text(), "", "Typical mistakes:", *(filled(each, 4) for each in wrong)]
    return "\n".join([line, *rest * whole])


def _solved() -> dict[str, list[str]]:
    """Return what each student has solved. Raises ConfigError for a damaged file."""
    try:
        path = Path(SOLVED).expanduser()
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{SOLVED} cannot be read ({error}): remove it") from None


def _keep(name: str, added: set[str], *, forget: bool = False) -> list[str]:
    """Add to what a student has solved, or forget it; return it. Raises ConfigError."""
    solved = _solved()
    ours = [] if forget else sorted({*solved.get(name.casefold(), []), *added})
    try:
        text = json.dumps({**solved, name.casefold(): ours})
        Path(SOLVED).expanduser().write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{SOLVED} cannot be written: {error}") from None
    return ours


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("number", nargs="?", help="an exercise, such as 1.1")
    add("answer", nargs="*", help="your answer, such as 37.2, 37,2 GiB or 1.5e9")
    add("--name", help="whose numbers (default: the variable STUDENT, or the login)")
    add("--solutions", action="store_true", help="print the answers, for teachers")
    add("--forget", action="store_true", help=f"forget what this student has solved ({SOLVED})")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other commands do before `| head`
    sys.exit(main(sys.argv[1:]))
