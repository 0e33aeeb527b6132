"""Chat messages as a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


# Arguments of the template that are decided here.
DECIDED = ("conversation", "tokenize", "add_generation_prompt", "continue_final_message")


def is_chat(prompt: object) -> bool:
    """Whether a prompt is a list of messages rather than text or token ids."""
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str | bytes)
        and bool(prompt)
        and isinstance(prompt[0], Mapping)
    )


def check_text(name: str, text: str) -> None:
    """Refuse text that has no bytes.

    Raises:
        ValueError: naming the argument and the half of a surrogate pair in it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be text that UTF-8 can write, "
            f"got {text[error.start]!r} at character {error.start}"
        ) from None


def chat_text(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, Any]], /, **template: Any
) -> str:
    """What the model reads of a chat, up to where its answer begins.

    Args:
        tokenizer: with a chat template.
        messages: each with "role" and "content"; a last one of the role "assistant" is the
            beginning of the answer, which the model goes on with.
        template: further arguments of the template.

    Raises:
        ValueError: the tokenizer has no template, a message lacks something, the template
            refuses the messages, or `template` has what the messages decide.
    """
    if not tokenizer.has_chat_template:
        raise ValueError(
            "chat messages need a tokenizer with a chat template; this one has none: give text"
        )
    for name in DECIDED:
        if name in template:
            raise ValueError(
                f"the chat template takes no {name}, got {template[name]!r}: the messages decide it"
            )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dict of role and content, got {message!r}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(
                    f"messages[{i}] must have a text as {key!r}, got {message.get(key)!r}"
                )
            check_text(f"messages[{i}][{key!r}]", message[key])
    begun = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=False,
            add_generation_prompt=not begun,
            continue_final_message=begun,
            **template,
        )
    except Exception as error:  # Jinja's own, and whatever a template comes upon
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    return str(text)


def encode_chat(
    tokenizer: TokenizerWrapper, messages: Sequence[Mapping[str, Any]], /, **template: Any
) -> list[int]:
    """Token ids of `chat_text`; the template has written the special tokens already."""
    text = chat_text(tokenizer, messages, **template)
    return list(tokenizer.encode(text, add_special_tokens=False))
