"""Talk to an exported model: answers stream as they are generated, before and after training.

    python tools/chat.py runs/NAME
    python tools/chat.py runs/NAME --before --prompt "What is 3 plus 4?"
    python tools/chat.py runs/NAME --tools tools.json   # whose calls the model was trained to write

The tokenizer's chat template formats the conversation; a model without one continues the text.
--before first answers each prompt with the weights that the run started from (model.init_from).
Without --prompt, it reads lines until Ctrl-D; an empty line starts a new conversation.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from harness.config.assignments import listed
from harness.errors import ConfigError
from harness.files.paths import option_path
from harness.files.turns import tools_of
from harness.layout.adapters import quiet_bitsandbytes
from harness.runfolder import RunFolder
from harness.terminal import command_parser, say
from tools.exported import ADAPTER_WEIGHTS, ADAPTERS, export_of, opened

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def main(argv: list[str]) -> int:
    """Run the command: argv -> answers on standard output -> exit code."""
    arguments = _parser().parse_args(argv)
    try:
        speakers = _speakers(arguments)
    except ConfigError as error:
        say(f"cannot chat: {error}", sys.stderr)
        return int(error.code)
    prompts = arguments.prompt or _lines()
    try:
        for prompt in prompts:
            for speaker in speakers:
                if not prompt:
                    speaker.turns.clear()
                    continue
                if len(speakers) > 1:
                    print(f"[{speaker.title}]")
                speaker.answer(prompt, arguments)
    except (KeyboardInterrupt, EOFError):
        print()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser, add = command_parser(__doc__)
    add("run", type=option_path, help="Run folder or exported model.")
    add("--prompt", action="append", help="Send one prompt and exit; may be repeated.")
    add("--before", action="store_true", help="Also show the answer before training.")
    add("--tokens", type=int, default=256, help="Maximum tokens per answer (default: 256).")
    warmth = "Sampling temperature; 0 picks the most likely token (default: 0)."
    add("--temperature", type=float, default=0.0, help=warmth)
    add("--seed", type=int, default=0, help="Sampling seed (default: 0).")
    tools = "File with a JSON list of tools, as in the column `tools` of data, for the template."
    add("--tools", type=option_path, help=tools)
    add("--system", help="System turn of each conversation.")
    add("--trust-remote-code", action="store_true", help="Run code that comes with the model.")
    return parser


def _lines() -> Iterator[str]:
    """Yield the typed lines; show a prompt only on a terminal."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        yield input("> ").strip()


@dataclass
class Speaker:
    """A model in a conversation."""

    title: str
    model: Any
    tokenizer: Any
    values: dict[str, Any]
    """Variables of the chat template: the run's data.template_values, and tools."""
    within: Context = contextlib.nullcontext
    """Context in which it answers."""
    turns: list[dict[str, str]] = field(default_factory=list)

    def answer(self, prompt: str, arguments: argparse.Namespace) -> None:
        """Print the answer to a prompt while it is generated."""
        import torch

        if not self.turns and arguments.system:
            self.turns.append({"role": "system", "content": arguments.system})
        self.turns.append({"role": "user", "content": prompt})
        ids = self._ids(prompt).to(self.model.device)
        torch.manual_seed(arguments.seed)
        drawn: dict[str, Any] = {"do_sample": False}
        if arguments.temperature > 0:
            drawn = {"do_sample": True, "temperature": arguments.temperature, "top_k": 0}
        end = end_of_turn(self.tokenizer)
        with self.within(), torch.no_grad():
            made = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=arguments.tokens,
                pad_token_id=self.tokenizer.eos_token_id,
                streamer=_printer(self.tokenizer, end),
                **({"stop_strings": [end], "tokenizer": self.tokenizer} if end else {}),
                **drawn,
            )
        text = self.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
        text = text.partition(end)[0] if end else text
        self.turns.append({"role": "assistant", "content": text.strip()})

    def _ids(self, prompt: str) -> Any:
        """Return the ids (1, tokens) of the conversation so far, or of a text to continue."""
        if self.tokenizer.chat_template is None:
            import torch

            from harness.data.tokenizer import added_at_begin

            ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
            return torch.tensor([[*added_at_begin(self.tokenizer), *ids]])
        return self.tokenizer.apply_chat_template(
            self.turns,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            **self.values,
        )["input_ids"]


def end_of_turn(tokenizer: Any) -> str:
    """Return the text that a chat template writes after an answer, such as <|im_end|>; "" if it
    writes none or there is no template.
    """
    if tokenizer.chat_template is None:
        return ""
    answer = "an answer"
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition(answer)[2].strip()


def _printer(tokenizer: Any, end: str) -> Any:
    """Return a streamer that prints an answer while it is generated, up to the end of the turn. If
    that end is not a special token of the tokenizer, its text arrives in pieces.
    """
    from transformers import TextStreamer

    class Printer(TextStreamer):  # type: ignore[misc]
        waiting = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            text = self.waiting + text
            held = next((n for n in range(len(end), 0, -1) if text.endswith(end[:n])), 0)
            if stream_end:
                text, held = text.removesuffix(end), 0
            self.waiting = text[len(text) - held :]
            super().on_finalized_text(text[: len(text) - held], stream_end)

    return Printer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _speakers(arguments: argparse.Namespace) -> list[Speaker]:
    """Return the models that answer, in order. Raises ConfigError if there is nothing to open."""
    folder, source = export_of(arguments.run)
    from harness.data.tokenizer import load_tokenizer

    plan = RunFolder(arguments.run).read_plan() or {}
    values = dict(plan.get("run", {}).get("data", {}).get("template_values", {}))
    if arguments.tools:
        try:
            values["tools"] = tools_of(arguments.tools.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tools {arguments.tools}: {error}") from error
    elif names := plan.get("data", {}).get("tools"):
        say(f"trained with tools ({listed(names)}), and asked without: --tools FILE", sys.stderr)
    remote = arguments.trust_remote_code
    tokenizer = load_tokenizer(folder, trust_remote_code=remote)
    if (folder / ADAPTERS).is_file():
        quiet_bitsandbytes()
        from peft import PeftModel

        from harness.models.initialize import add_rows, rows_of_adapters

        source = json.loads((folder / ADAPTERS).read_text())["base_model_name_or_path"]
        base = opened(source, remote, folder)
        add_rows(base, rows_of_adapters(folder / ADAPTER_WEIGHTS, base))
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        before = Speaker("before", model, tokenizer, values, model.disable_adapter)
    else:
        model = opened(folder, remote)
        before = None
        if arguments.before:
            if source is None:
                raise ConfigError(
                    f"{arguments.run} did not start from pretrained weights: remove --before"
                )
            before = Speaker("before", opened(source, remote), tokenizer, values)
    after = Speaker("after", model, tokenizer, values)
    return [before, after] if arguments.before and before else [after]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
