"""Shipped configs are found by name from any folder, and commands name the clone's files there."""

from pathlib import Path

import pytest

from harness.config.ds_json import read_ds_json
from harness.config.run_file import read_toml
from harness.errors import ConfigError
from harness.files.paths import DS_CONFIGS, REPOSITORY, RUN_CONFIGS, script, shipped
from tests.tables import beside


@pytest.mark.parametrize(("name", "own", "found"), beside(__file__, "paths.toml")["found"])
def test_a_config_is_found_here_or_in_the_clone(
    name: str, own: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if own:
        (tmp_path / own).parent.mkdir(exist_ok=True)
        (tmp_path / own).write_text("{}")
    path, folders = Path(name), DS_CONFIGS if name.endswith("json") else RUN_CONFIGS
    file = REPOSITORY / found if found else path
    if file.is_file():
        assert shipped(path, folders) == file
        return
    with pytest.raises(ConfigError) as caught:
        read_ds_json(path) if folders is DS_CONFIGS else read_toml(path)
    places = "" if path.is_absolute() else f" below {tmp_path} or in {REPOSITORY / folders[0]}"
    assert f"{name}{places}" in str(caught.value)
    assert str(caught.value).endswith(found)


def test_command_names_scripts_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    assert script("harness/train.py") == "harness/train.py"
    assert script("harness/train.py", tmp_path) == f"{REPOSITORY}/harness/train.py"
    monkeypatch.chdir(tmp_path)
    assert script("harness/train.py") == f"{REPOSITORY}/harness/train.py"
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness/train.py").touch()  # another clone's
    assert script("harness/train.py") == f"{REPOSITORY}/harness/train.py"
