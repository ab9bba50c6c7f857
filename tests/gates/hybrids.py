"""Small models of every text family in transformers with states, convolutions or linear layers."""

from typing import Any

from tests.tables import beside

Config = dict[str, Any]

_TABLES = beside(__file__, "hybrids.toml")
HYBRIDS: dict[str, Config]
NEWER: dict[str, Config]
HYBRIDS, NEWER = (
    {name: {"model_type": name, **config} for name, config in _TABLES[table].items()}
    for table in ("hybrids", "newer")
)
"""Additional decoders that came with transformers 5.21 to 5.24."""
