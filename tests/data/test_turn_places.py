"""What finding turns costs, and what its messages advise."""

from __future__ import annotations

from time import process_time

import pytest

from harness.data.chat_tokens import ChatEncoder
from harness.files.chat import Chat
from tests.data.chat_tokenizers import tokenizer_of
from tests.data.test_chats import BOT

OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("tags", [f"<{'think' * 20_000}>", "<think>" * 5000])
def test_tags_of_thoughts_in_a_users_text_are_passed_at_once(tags: str) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = OPENED
    chat = Chat([{"role": "user", "content": f"a {tags} ?"}, BOT])
    started = process_time()
    rendered = ChatEncoder(tokenizer, "assistant").render(chat)
    assert process_time() - started < 5
    ((start, stop),) = rendered.learned
    assert rendered.text[start:stop] == "b.<|im_end|>"
