"""What finding turns costs, and what its messages advise."""

from __future__ import annotations

from typing import Any

import pytest

from harness.data.chat_tokens import ChatEncoder
from harness.data.rendering import ChatTemplate
from harness.files.chat import Chat
from tests.data.chat_tokenizers import tokenizer_of
from tests.data.test_chats import BOT, USER, without_marks

OPENED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@pytest.mark.parametrize("tags", [f"<{'think' * 20_000}>", "<think>" * 5000])
def test_tags_of_thoughts_in_a_users_text_are_passed_at_once(tags: str) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = OPENED
    chat = Chat([{"role": "user", "content": f"a {tags} ?"}, BOT])
    rendered = ChatEncoder(tokenizer, "assistant").render(chat)
    ((start, stop),) = rendered.learned
    assert rendered.text[start:stop] == "b.<|im_end|>"


# It refuses marked texts: all ways to mark them are tried.
REFUSING = "{% if 'Qz' in m.content %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(("learn", "refuses", "most"), [("last", False, 4), ("all", False, 2),
                                                       ("all", True, 3)])  # fmt: skip
def test_turns_that_nothing_is_asked_of_are_not_rendered(
    monkeypatch: pytest.MonkeyPatch, learn: str, refuses: bool, most: int
) -> None:
    tokenizer, rendered = without_marks(tokenizer_of("chatml")), []
    if refuses:
        loop = "{%- for m in messages %}"
        tokenizer.chat_template = f"{loop}{REFUSING}{{%- endfor %}}{tokenizer.chat_template}"
    encoder, render = ChatEncoder(tokenizer, learn), ChatTemplate._render

    def counted(self: ChatTemplate, messages: Any, *more: Any, **options: Any) -> Any:
        rendered.append(len(messages))
        return render(self, messages, *more, **options)

    monkeypatch.setattr(ChatTemplate, "_render", counted)
    encoder.render(Chat([USER, BOT] * 20))
    assert len(rendered) <= most


@pytest.mark.parametrize("is_first", [True, False])
def test_the_last_turn_alone_is_advised_where_it_is_found(is_first: bool) -> None:
    tokenizer = tokenizer_of("chatml")
    test = "loop.first or loop.index == 2" if is_first else "loop.last"
    tokenizer.chat_template = OPENED.replace("<think>\\n", "").replace(
        "m.role +", f"(m.role if m.role == 'user' or not ({test}) else 'bot') +"
    )
    chat = Chat([USER, BOT, USER, {"role": "assistant", "content": "c."}])
    with pytest.raises(ValueError, match="does not begin with its generation prompt") as caught:
        ChatEncoder(tokenizer, "assistant").render(chat)
    assert ("data.learn=last" in str(caught.value)) == is_first
    if is_first:
        assert ChatEncoder(tokenizer, "last").render(chat).learned


def test_a_template_that_refuses_the_beginning_of_a_conversation_is_named() -> None:
    tokenizer = without_marks(tokenizer_of("chatml"))
    even = "{% if messages | length == 2 %}{{ raise_exception('too short') }}{% endif %}"
    tokenizer.chat_template = even + tokenizer.chat_template
    with pytest.raises(
        ValueError, match="refuses the conversation up to that turn: TemplateError:"
    ):
        ChatEncoder(tokenizer, "assistant").render(Chat([USER, BOT, USER, BOT]))
