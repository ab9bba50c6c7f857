"""Plans of a command line, written as after train.py, and the small models that it may name."""

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file

from harness.errors import ConfigError
from harness.layout.shape import Shape
from harness.layout.world import World
from harness.plan.command import parse_command, plan_from
from harness.plan.make import with_facts
from harness.plan.memory import Untraceable
from harness.plan.model_config import find_model_config
from harness.plan.plan import Counts, Facts, Plan
from tests.engine.small import MODEL
from tests.gates.hybrids import HYBRIDS
from tests.gates.models import LEARNED

_NO_RATE = {key: value for key, value in LEARNED["qwen3"].items() if key != "rope_parameters"}
_PRESETS = ("llama-1b", "llama-2-7b", "llama-3-70b")
MODELS: dict[str, Mapping[str, Any]] = {
    **{name.replace("-", "_"): find_model_config(name)[0] for name in _PRESETS},
    "small": MODEL,
    **HYBRIDS,
    **LEARNED,
    "bloom_slow": {**LEARNED["bloom"], "slow_but_exact": True},
    "bloom_exact": {**LEARNED["bloom"], "slow_but_exact": True, "pretraining_tp": 2},
    "no_rate": _NO_RATE,
    "unbalanced": {**LEARNED["mixtral"], "output_router_logits": False},
    **{
        method: {**LEARNED["llama"], "quantization_config": {"quant_method": method}}
        for method in ("fp8", "gptq")
    },
    "parallel_residual": {**LEARNED["gpt_neox"], "use_parallel_residual": True},
    "opt_dropping": {**LEARNED["opt"], "activation_dropout": 0.1},
    "no_layers": {"model_type": "brand_new", "hidden_size": 8},
    "qwen3_layers": {**LEARNED["qwen3"], "layer_types": ["full_attention"] * 2},
    "two_rotations": {**_NO_RATE, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
}

_WEIGHTS = Path(__file__).with_name("weights.toml")
_CAPITALS = ("RANKS", "GPU=", "TORCH=", "EXAMPLES=", "WINDOWS=")


class Planner:
    """Plans command lines; `$NAME` is the folder of a small model.

    RANKS=4, RANKS_PER_NODE=2, GPU=h100-80, RANKS_PER_GPU=2, RANKS_BUT_GPUS=1 and TORCH=2.11.0
    describe the machine, which has CPUs unless it has a GPU; EXAMPLES=294 and WINDOWS=28 the data,
    once it is counted. The JSON is empty except for the words, unless they name one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "empty.json").write_text("{}")
        for name, config in MODELS.items():
            self.add(name, config)
        for name, row in tomllib.loads(_WEIGHTS.read_text(encoding="utf-8")).items():
            self._add_weights(name, row)

    def _add_weights(self, name: str, row: Mapping[str, Any]) -> None:
        llama = {**LEARNED["llama"], "tie_word_embeddings": False}
        folder, prefix = self.add(name, llama | row.get("config", {})).parent, row.get("prefix", "")
        sizes = {each.name: each.shape for each in Shape.from_hf(llama).tensors()}
        sizes |= row.get("tensors", {})
        names, fill = sorted(each for each, size in sizes.items() if size), row.get("fill")
        for number in range(2):
            shard = {prefix + n: torch.full(sizes[n], fill or len(n)) for n in names[number::2]}
            save_file(shard, folder / f"{number}.safetensors", {"format": "pt"})
        index = {prefix + each: f"{names.index(each) % 2}.safetensors" for each in names}
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
        if own := row.get("file"):  # the index is removed, or a whole file added
            index_file.unlink() if own == index_file.name else save_file({}, folder / own)

    def add(self, name: str, config: Mapping[str, Any]) -> Path:
        """Write a model's config.json."""
        path = self._folder / name / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config))
        return path

    def __call__(
        self,
        line: str,
        ds: Mapping[str, Any] | None = None,
        *,
        estimate: bool = True,
        counts: Counts | None = None,
        facts: Facts | None = None,
    ) -> Plan:
        """Return the plan of a line. `ds` holds keys of the JSON that the line's words override;
        without an `estimate`, nothing is traced. `counts`: as EXAMPLES and WINDOWS; `facts`: these
        and others.
        """
        words = shlex.split(re.sub(r"\$(\w+)", rf"{self._folder}/\1", line))
        machine = dict(word.split("=") for word in words if word.startswith(_CAPITALS))
        json_path = self._folder / ("empty.json" if ds is None else "ds.json")
        if ds is not None:
            json_path.write_text(json.dumps(ds))
        words = [word for word in words if word.partition("=")[0] not in machine]
        command = parse_command([f"--deepspeed={json_path}", *words])
        ranks = machine.get("RANKS", "1")
        per_node = machine.get("RANKS_PER_NODE", ranks)
        launched = {"RANK": "0", "WORLD_SIZE": ranks, "LOCAL_RANK": "0"}
        environ = {"DS_ACCELERATOR": "cpu", **launched, "LOCAL_WORLD_SIZE": per_node}
        world = None
        if gpu := machine.get("GPU"):
            world = World(
                *(0, int(ranks), 0, int(per_node)),
                accelerator="cuda",
                gpu=gpu,
                torch=machine.get("TORCH"),
                ranks_per_gpu=int(machine.get("RANKS_PER_GPU", "1")),
                lacking_gpus=int(machine.get("RANKS_BUT_GPUS", "0")),
            )
        with ExitStack() as patches:
            if not estimate:
                patches.enter_context(patch("harness.plan.model.estimate", return_value=None))
                patches.enter_context(patch("harness.plan.memory.traced", side_effect=Untraceable))
            made = plan_from(command, environ, world)
            if counts is None and "WINDOWS" in machine:
                counts = Counts(int(machine["EXAMPLES"]), int(machine["WINDOWS"]), is_masked=True)
            facts = facts or (Facts(counts) if counts else None)
            return made if facts is None else with_facts(made, facts)

    def problems(self, line: str, ds: Mapping[str, Any] | None = None) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self(line, ds)
        return [self.plain(problem) for problem in caught.value.problems]

    def notes(self, line: str, ds: Mapping[str, Any] | None = None) -> list[str]:
        """Return the events of a plan, each as a line, without what is chosen on any GPU."""
        return [
            f"{event['kind']}: "
            + self.plain(event.get("message") or "{key} = {value}, from {json_key}".format(**event))
            for event in self(line, ds).events
            if event["kind"] != "chosen"
        ]

    def plain(self, sentence: str) -> str:
        """Return a sentence without "(command line)", the origin of most of its values."""
        return sentence.replace(" (command line)", "").replace(f"{self._folder}/", "$")
