"""The sample that a run keeps of the data it read: PREFIX.bin, .idx and masks in its folder."""

from pathlib import Path

from harness.errors import ConfigError
from harness.files.records import Unreadable, read_object

FOLDER = "reservoir"
TRAIN, HELD_OUT, FACTS = "train", "held_out", "facts.json"


def kept_sample(text: str) -> Path | None:
    """Return the sample folder of the run that data.rehearse names; None if it is not a run.

    Raises ConfigError if the run has kept no sample, or if the folder cannot be read.
    """
    run = Path(text)
    try:
        has_sample, is_run = (run / FOLDER / FACTS).is_file(), (run / "plan.json").is_file()
    except OSError as error:
        raise ConfigError(f"data.rehearse: cannot read {text}: {error.strerror}") from None
    if has_sample:
        return run / FOLDER
    if is_run:
        raise ConfigError(
            f"data.rehearse is {text!r}, a run that kept no sample of its data "
            "(data.reservoir, written from the first checkpoint on): name the path of its data"
        )
    return None


def side_of_sample(text: str) -> Path | None:
    """Return a path without its suffix if it is a side of a kept sample, otherwise None."""
    path = Path(text)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    files = (Path(f"{prefix}.bin"), prefix.parent / FACTS)
    is_side = prefix.name in (TRAIN, HELD_OUT) and all(file.is_file() for file in files)
    return prefix if is_side else None


def kept_facts(folder: Path, key: str = "data.rehearse") -> dict[str, object]:
    """Return the facts of a kept sample. Raises ConfigError if they are damaged."""
    try:
        facts = read_object(folder / FACTS)
    except (Unreadable, OSError) as error:
        raise ConfigError(f"{key}: {error}") from error
    return facts or {}


def masks_of(prefix: Path) -> Path:
    """Return the file beside a .bin/.idx pair that masks tokens from the loss."""
    return Path(f"{prefix}.masks.npy")
