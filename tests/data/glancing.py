"""A dry run's view of a data section."""

from harness.config.data_section import DataConfig
from harness.data.glance import Glance, Glances
from harness.data.glance import glance as glance_of
from harness.data.glance import glances as glances_of
from harness.data.spec import DataSpec


def glances(config: DataConfig) -> Glances:
    """Return the view of all sources."""
    return glances_of(DataSpec(config))


def glance(config: DataConfig) -> Glance:
    """Return the view of a single source without a tokenizer, but with a chat template."""
    return glance_of(DataSpec(config.model_copy(update={"template": "chatml"})))
