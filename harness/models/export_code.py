"""Model code that is exported with its weights, and loading of such exports.

transformers runs the code with trust_remote_code=True. If only the attention differs, readers
without the code open the same weights with exact attention. Reversible layers have a separate
model_type, which such readers reject.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.utils import logging

from harness.layout.code_exports import ATTENTION, CODE, as_plain, is_as_trained, reversible_type
from harness.layout.recompute import REVERSIBLE
from harness.models.as_trained import AsTrained
from harness.models.skeleton import hf_config

_ABOUT = '''"""Code of the trained model, written next to its weights with everything it imports."""

'''
_ROOM = Path(__file__).parent
_IMPORT = re.compile(r"^from harness\.models\.([\w.]+) import ", re.MULTILINE)


def write_code(folder: Path, model: PreTrainedModel, attention: Mapping[str, Any]) -> None:
    """Make the model exported to `folder` compute as in training when it is opened: with its kind
    of attention ({} for exact attention), and with reversible layers if its config has them.
    """
    path, family, own = folder / "config.json", type(model), f"AsTrained{type(model).__name__}"
    config, body = json.loads(path.read_text(encoding="utf-8")), "    pass"
    codes = {"AutoModelForCausalLM": f"{CODE}.{own}"}
    copied = copy_code("as_trained", folder)
    # transformers 4 copies only the files named here, not those that they import.
    others = "".join(f"from .{name} import __doc__ as _\n" for name in copied[1:])
    before = f"{_import_of(family)}\n\nfrom .as_trained import AsTrained\n{others}\n\n"
    if attention:
        config[ATTENTION] = dict(attention)
    if config.get(REVERSIBLE):
        of_family = type(model.config)
        config["model_type"] = reversible_type(config["model_type"])
        config["architectures"] = [own]
        codes["AutoConfig"] = f"{CODE}.AsTrainedConfig"
        before = f"{_import_of(of_family)}\n{before}class AsTrainedConfig({of_family.__name__}):\n"
        before += f"    model_type = {config['model_type']!r}\n\n\n"
        body = "    config_class = AsTrainedConfig"
    config["auto_map"] = {**config.get("auto_map", {}), **codes}
    code = f"{_ABOUT}{before}class {own}(AsTrained, {family.__name__}):\n{body}\n"
    (folder / f"{CODE}.py").write_text(code, encoding="utf-8")
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _import_of(own: type) -> str:
    """Return the import line for a class of transformers, or of a model with its own code."""
    module = own.__module__
    home = "transformers" if module.startswith("transformers.") else f".{module.split('.')[-1]}"
    return f"from {home} import {own.__name__}"


def copy_code(name: str, folder: Path) -> list[str]:
    """Copy a file of this package and the files it imports, rewritten to import each other. Return
    their names, the first file's first.
    """
    waiting, copied = [name], list[str]()
    while waiting:
        name = waiting.pop()
        if _flat(name) not in copied:
            copied.append(_flat(name))
            text = (_ROOM / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")
            waiting += _IMPORT.findall(text)
            text = _IMPORT.sub(lambda match: f"from .{_flat(match[1])} import ", text)
            (folder / f"{_flat(name)}.py").write_text(text, encoding="utf-8")
    return copied


def opened_as_trained(folder: Path, **how: Any) -> PreTrainedModel | None:
    """Open an export with such code, using this harness's own copy of it; None for any other
    folder. `how`: arguments of from_pretrained.
    """
    path = folder / "config.json"
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not is_as_trained(values):
        return None
    logging.disable_progress_bar()
    config = hf_config(as_plain(values))
    config.trained_attention = values.get(ATTENTION)
    opened: PreTrainedModel = class_as_trained(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    return opened.from_pretrained(folder, config=config, **how)


def class_as_trained(family: Any) -> Any:
    """Return a subclass of a transformers class that computes as in training."""
    # transformers looks up names in the class's module, so it must be the family's.
    return type(
        f"AsTrained{family.__name__}", (AsTrained, family), {"__module__": family.__module__}
    )


def _flat(name: str) -> str:
    """Return the module name of a copied file."""
    return name.replace(".", "_")
