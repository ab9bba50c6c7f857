"""A mixture of experts in the place of a model that has none, for a JSON that divides experts."""

from __future__ import annotations

from dataclasses import replace

from harness.config.ds_file import PREFIX, load_ds_json
from harness.config.run_file import load_run_config
from harness.errors import ConfigError
from harness.layout.expert import ExpertPlan
from harness.plan.command import Command
from harness.plan.model_config import load_model_config

MIXTURE = "mixtral-8x7b"
_OF_THE_MODEL = ("model.name=", "model.init_from=", "model.overrides")


def with_experts(asked: Command) -> tuple[Command, str | None]:
    """Return the command with experts that its JSON can divide, and the preset that brings them;
    the command as it is, and None, where nothing is divided, its own model has experts, or it
    cannot be read, as planning will say.
    """
    words = asked.assignments
    of_ds = (word.removeprefix(PREFIX) for word in words if word.startswith(PREFIX))
    ds, problems = load_ds_json(asked.deepspeed_path, of_ds)
    if problems or not ds.value("expert_parallel.enabled"):
        return asked, None
    try:
        own = [word for word in words if not word.startswith(PREFIX)]
        config, _ = load_model_config(load_run_config(asked.config_path, own))
    except ConfigError:
        return asked, None
    try:
        ExpertPlan.of(config)
        return asked, None
    except ValueError:
        others = [word for word in words if not word.startswith(_OF_THE_MODEL)]
        return replace(asked, assignments=(*others, f"model.name={MIXTURE}")), MIXTURE
