"""Chats that a template refuses as they came are rendered in a form that it takes; all others keep their tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from service.core import BadRequest, ChatEnd, Grammar, GrammarKind, PieceKind, Reasoning
from service.models.templates import load_chat_tokenizer
from service.models.text import TextEncoder
from tests.models.conftest import byte_vocabulary, write_tokenizer

SPECIAL = ("<think>", "</think>", "<end>")
TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for tool_call in m.tool_calls or [] %}"
    "<tool_call>{{ tool_call.name }}{{ tool_call.id }} {{ tool_call.function.name }}</tool_call>{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSE = "{{ raise_exception('%s') }}"
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    + REFUSE % "system first"
    + "{% endif %}{% endfor %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}" + REFUSE % "no system role" + "{% endif %}"
ALTERNATING = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == ns.last and m.role != 'tool' %}"
    + REFUSE % "roles alternate"
    + "{% endif %}{% if m.role == 'user' and ns.last == 'tool' %}"
    + REFUSE % "no user behind a tool"
    + "{% endif %}{% set ns.last = m.role %}{% endfor %}"
)
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id is undefined or c.id | length != 9 %}"
    + REFUSE % "nine characters"
    + "{% endif %}{% endfor %}{% endfor %}"
)
NEEDS_USER = (
    "{% if not (messages | selectattr('role', 'equalto', 'user') | list) %}" + REFUSE % "no user" + "{% endif %}"
)
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for tool_call in m.tool_calls or [] %}<tool_call>"
    "{{ tool_call.name }}{% for k, v in tool_call.function.arguments | items %}{{ k }}={{ v }};{% endfor %}"
    "{% endfor %}{% endfor %}"
)
CONCATENATED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for tool_call in m.tool_calls or [] %}<tool_call>"
    "{{ tool_call.name }}{{ '```' + tool_call.function.arguments + '```' }}{% endfor %}{% endfor %}"
)
FUNCTIONS = (
    "{# <tool_call> tool_call.name #}{% for t in tools or [] %}{{ t.function.name + ': ' + t.function.description }}"
    "{% for k, v in t.function.parameters.properties | items %}{{ k }},{% endfor %}{% endfor %}" + TURNS
)


def encoder_of(template: str | Mapping[str, str]) -> TextEncoder:
    tokenizer = Tokenizer(BPE(byte_vocabulary(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=template)
    marks = ("<tool_call>", "</tool_call>")
    return TextEncoder(
        TokenizerWrapper(fast, tool_call_start=marks[0], tool_call_end=marks[1], tool_parser=json_tools.parse_tool_call)
    )


def said(role: str, content: str, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def call(arguments: object = None, id: str = "call_1", name: str = "look") -> dict[str, object]:
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }


def called(*calls: Mapping[str, object], content: str = "") -> dict[str, object]:
    return said("assistant", content, tool_calls=list(calls))


def rendered(
    encoder: TextEncoder,
    turns: Sequence[Mapping[str, object]],
    tools: Sequence[Mapping[str, object]] = (),
    end: ChatEnd = ChatEnd.NEW_TURN,
) -> str:
    tokens = encoder.encode_chat(turns, tools, None, end).tokens
    return b"".join(map(encoder.token_bytes, tokens)).decode()


USER, ANSWER, RULE = said("user", "x"), said("assistant", "y"), said("system", "s")
RESULT = said("tool", "4", tool_call_id="call_1")


@pytest.mark.parametrize(
    ("template", "turns", "prompt"),
    [
        (SYSTEM_FIRST + TURNS, [RULE, said("system", "d"), USER], "[system]s\n\nd[user]x[assistant]"),
        (SYSTEM_FIRST + TURNS, [USER, ANSWER, RULE, USER], "[system]s[user]x[assistant]y[user]x[assistant]"),
        (SYSTEM_FIRST + ALTERNATING + TURNS, [USER, RULE, USER], "[system]s[user]x\n\nx[assistant]"),
        (NO_SYSTEM + TURNS, [RULE, USER], "[user]s\n\nx[assistant]"),
        (NO_SYSTEM + TURNS, [RULE], "[user]s[assistant]"),
        (NO_SYSTEM + TURNS, [ANSWER, RULE, USER], "[assistant]y[system]s[user]x[assistant]"),
        (NEEDS_USER + TURNS, [RULE], "[user]s[assistant]"),
        (ALTERNATING + TURNS, [USER, USER, ANSWER, ANSWER, USER], "[user]x\n\nx[assistant]y\n\ny[user]x[assistant]"),
        (ALTERNATING + TURNS, [USER, said("user", ""), said("user", "z")], "[user]x\n\nz[assistant]"),
        (
            ALTERNATING + TURNS,
            [USER, called(call()), RESULT, said("user", "go on"), said("user", "now")],
            "[user]x[assistant][tool]4\n\ngo on\n\nnow[assistant]",
        ),
        (ALTERNATING + TURNS, [USER, called(call()), RESULT, RESULT], "[user]x[assistant][tool]4[tool]4[assistant]"),
        (ITEMS, [USER, called(call('{"a": 1')), RESULT], '[user]x[assistant]<tool_call>arguments={"a": 1;[tool]4'),
        (ITEMS, [USER, called(call("[1]")), RESULT], "[user]x[assistant]<tool_call>arguments=[1];[tool]4"),
        (ITEMS, [USER, called(call("  ")), RESULT], "[user]x[assistant]<tool_call>[tool]4"),
        (ITEMS, [USER, called(call("null")), RESULT], "[user]x[assistant]<tool_call>[tool]4"),
        (ITEMS, [USER, called(call({"a": 1})), RESULT], "[user]x[assistant]<tool_call>a=1;[tool]4"),
        (
            CONCATENATED,
            [USER, called(call({"a": "é"})), RESULT],
            '[user]x[assistant]<tool_call>```{"a": "é"}```[tool]4',
        ),
        (CONCATENATED, [USER, called(call('{"a"')), RESULT], '[user]x[assistant]<tool_call>```{"a"```[tool]4'),
    ],
)
def test_a_chat_that_is_refused_gets_a_normal_form(template: str, turns: list[dict[str, object]], prompt: str) -> None:
    encoder = encoder_of(template)
    for _ in range(2):
        assert rendered(encoder, turns) == prompt


def test_what_renders_keeps_its_tokens_whatever_was_normalised_before() -> None:
    turns = [USER, said("system", "later"), USER, USER, ANSWER, ANSWER, called(call("{")), RESULT, USER]
    plain = "".join(f"[{turn['role']}]{turn['content']}" for turn in turns) + "[assistant]"
    assert rendered(encoder_of(TURNS), turns) == plain
    # Only two neighbours that say "x" are refused: the rest of the chat stays as it is, and other chats do.
    once = (
        "{% if messages[0].content == 'x' and messages[1].content == 'x' %}" + REFUSE % "twice" + "{% endif %}" + TURNS
    )
    encoder = encoder_of(once)
    assert rendered(encoder, [USER, USER, RULE, ANSWER]) == "[user]x\n\nx[system]s[assistant]y[assistant]"
    assert rendered(encoder, turns) == plain


@pytest.mark.parametrize("ids", [["call_0123456789abcdef01234567"], ["toolu_1", "toolu_2"], ["a1B2c3D4e", "call_1"]])
def test_ids_of_calls_are_those_that_a_template_takes(ids: list[str]) -> None:
    encoder = encoder_of(NINE + CALLS)
    results = [said("tool", "4", tool_call_id=id) for id in reversed(ids)]
    turns = [USER, called(*(call(id=id) for id in ids)), *results]
    prompt = rendered(encoder, turns)
    parts = prompt.split("<tool_call>")[1:]
    new = [part.split(" ")[0] for part in parts]
    assert all(len(id) == 9 and id.isalnum() for id in new)
    assert len(set(new)) == len(ids)
    assert [end.removesuffix("[assistant]") for end in prompt.split("[tool]4")[1:]] == list(reversed(new))
    assert [id for id in ids if len(id) == 9] == [id for id in new if id in ids]
    assert rendered(encoder, [*turns, ANSWER, USER]).startswith(prompt), "a prompt keeps its prefix"
    assert ids[0] in rendered(encoder_of(CALLS), turns)


def test_the_reason_is_that_of_the_chat_as_it_came() -> None:
    encoder = encoder_of("{{ raise_exception('never: ' ~ messages | length) }}")
    with pytest.raises(BadRequest, match="never: 2") as caught:
        encoder.encode_chat([USER, USER])
    assert caught.value.field == "messages"
    for broken in ("{{ 1 // 0 }}", "{{ messages | first | int(base=99) + 'x' }}"):
        with pytest.raises(BadRequest, match="template refuses"):
            encoder_of(broken).encode_chat([USER])


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        {},
        {"type": "object"},
        {"type": "object", "properties": None, "required": None},
        {"type": "object", "properties": {"a": {}}},
    ],
)
def test_functions_without_parameters_or_description(parameters: object) -> None:
    function: dict[str, object] = {"name": "f"}
    if parameters is not None:
        function["parameters"] = parameters
    tools = [{"type": "function", "function": function}]
    names = "a," if isinstance(parameters, dict) and parameters.get("properties") else ""
    assert rendered(encoder_of(FUNCTIONS), [USER], tools) == f"f: {names}[user]x[assistant]"


def test_a_tools_turn_has_the_name_of_the_tool() -> None:
    named = "{% if m.role == 'tool' %}({{ m.name }}){% endif %}"
    template = "{% for m in messages %}{{ m.role }}" + named + ":{{ m.content }};{% endfor %}"
    turns = [
        USER,
        called(call(name="look"), call(id="call_2", name="find")),
        said("tool", "2", tool_call_id="call_2"),
        RESULT,
    ]
    other = [*turns, said("tool", "?", tool_call_id="nobody"), said("tool", "n", tool_call_id="call_1", name="own")]
    assert rendered(encoder_of(template), other) == "user:x;assistant:;tool(find):2;tool(look):4;tool():?;tool(own):n;"


def test_contents_are_parts_where_a_template_reads_parts_alone() -> None:
    encoder = encoder_of(PARTS)
    chat = [RULE, USER, called(call()), RESULT, ANSWER, USER]
    assert rendered(encoder, chat) == "[system]s[user]x[assistant][tool]4[assistant]y[user]x"
    both = "{% for m in messages %}{{ m.content if m.content is string else 'parts' }}{% endfor %}"
    assert rendered(encoder_of(both), [RULE, USER]) == "sx"
    # The user's contents are parts here, the system's are not.
    mixed = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    assert rendered(encoder_of(mixed), [RULE, USER]) == "sx"
    strict = "{% for m in messages %}{{ '[' + m.content[0]['text'] + ']' }}{% endfor %}"
    assert rendered(encoder_of(strict), [RULE, USER]) == "[s][x]"


# ------------------------------------------------------------------------------------------------------- named templates


def test_the_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain " + TURNS},
        {"name": "tool_use", "template": "{{ tools | length }} tools " + CALLS},
        {"name": "rag", "template": "rag"},
    ]
    write_tokenizer(tmp_path, byte_vocabulary(), template=None)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    encoder = TextEncoder(load_chat_tokenizer(tmp_path))
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert rendered(encoder, [USER]) == "plain [user]x[assistant]"
    assert rendered(encoder, [USER], tools) == "1 tools [user]x[assistant]"
    pieces = encoder.answer_reader(tools, Reasoning.CLOSED).add('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    assert [piece.kind for piece in pieces] == [PieceKind.CALL]
    alone = encoder_of({"rag": TURNS})
    assert rendered(alone, [USER]) == "[user]x[assistant]"


# ------------------------------------------------------------------------------------------------------------- reasoning

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ OPENING }}{% endif %}"
)
UNLESS_TOLD = "'<think></think>' if messages | selectattr('content', 'equalto', 'quiet') | list else '<think>'"
BEHIND_NO_RESULT = "'<think>' if messages[-1].role != 'tool'"
WHERE_ASKED = "'<think>' if enable_thinking is defined and enable_thinking else '<think></think>'"
UNLESS_FORBIDDEN = "'<think></think>' if enable_thinking is defined and not enable_thinking else '<think>'"


def thinks(opening: str) -> TextEncoder:
    return encoder_of(THINKS.replace("OPENING", opening))


@pytest.mark.parametrize(
    ("opening", "turns", "options", "reasoning"),
    [
        (UNLESS_TOLD, [USER], {}, Reasoning.OPEN),
        (UNLESS_TOLD, [said("system", "quiet"), USER], {}, Reasoning.CLOSED),
        (UNLESS_TOLD, [said("system", "</think>"), USER], {}, Reasoning.OPEN),
        (BEHIND_NO_RESULT, [USER], {}, Reasoning.OPEN),
        (BEHIND_NO_RESULT, [USER, called(call()), RESULT], {}, Reasoning.FREE),
        (BEHIND_NO_RESULT, [said("user", "<think>"), called(call()), RESULT], {}, Reasoning.FREE),
        (WHERE_ASKED, [USER], {}, Reasoning.CLOSED),
        (WHERE_ASKED, [USER], {"enable_thinking": True}, Reasoning.OPEN),
        (UNLESS_FORBIDDEN, [USER], {}, Reasoning.OPEN),
        (UNLESS_FORBIDDEN, [USER], {"enable_thinking": False}, Reasoning.CLOSED),
        ("''", [said("user", "what is <think>?")], {}, Reasoning.FREE),
        ("''", [said("assistant", "<think>a</think>b"), said("user", "<think>")], {}, Reasoning.FREE),
    ],
)
def test_the_prompt_says_whether_an_answer_begins_with_reasoning(
    opening: str, turns: list[dict[str, object]], options: dict[str, object], reasoning: Reasoning
) -> None:
    encoder = thinks(opening)
    encoded = encoder.encode_chat(turns, (), options)
    assert encoded.reasoning is reasoning
    reader = encoder.answer_reader((), encoded.reasoning)
    pieces = [*reader.add("Blue"), *reader.finish(cut=False)]
    assert {piece.kind for piece in pieces} == {PieceKind.REASONING if reasoning is Reasoning.OPEN else PieceKind.TEXT}
    mask = encoder.constraint(Grammar(GrammarKind.CHOICE, '["yes"]', "f"), encoded.reasoning).masks(())[0]
    (b,) = encoder.encode_text("B")
    assert bool(mask[b >> 3] >> (b & 7) & 1) == (reasoning is Reasoning.OPEN)


def test_a_template_that_always_opens_the_turn() -> None:
    always = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    assert encoder_of(always + "<think>\n").encode_chat([USER]).reasoning is Reasoning.OPEN
    assert encoder_of(always + "<think></think>\n").encode_chat([USER]).reasoning is Reasoning.CLOSED
    assert encoder_of(always).encode_chat([said("user", "<think> is")]).reasoning is Reasoning.FREE
    wanted = "{% if not add_generation_prompt %}" + REFUSE % "always" + "{% endif %}" + always + "<think>"
    assert encoder_of(wanted).encode_chat([USER]).reasoning is Reasoning.OPEN


# ---------------------------------------------------------------------------------------------------- ends of the prompt

CLOSING = TURNS.replace("{{ m.content }}", "{{ m.content | trim }}[end]")


@pytest.mark.parametrize(
    ("turns", "end", "prompt"),
    [
        ([USER], ChatEnd.NEW_TURN, "[user]x[end][assistant]"),
        ([USER], ChatEnd.CLOSED, "[user]x[end]"),
        ([USER, ANSWER], ChatEnd.CONTINUED, "[user]x[end][assistant]y"),
        ([USER, said("assistant", "")], ChatEnd.CONTINUED, "[user]x[end][assistant]"),
        ([said("user", "Once upon ")], ChatEnd.CONTINUED, "[user]Once upon"),
        ([USER, said("assistant", "[end]")], ChatEnd.CONTINUED, "[user]x[end][assistant][end]"),
    ],
)
def test_a_prompt_ends_as_it_is_asked_to(turns: list[dict[str, object]], end: ChatEnd, prompt: str) -> None:
    assert rendered(encoder_of(CLOSING), turns, (), end) == prompt


@pytest.mark.parametrize(
    ("content", "reasoning"),
    [
        ("", Reasoning.FREE),
        ("Blue", Reasoning.CLOSED),
        ("<think>Let me", Reasoning.OPEN),
        ("<think>so</think>Blue", Reasoning.CLOSED),
    ],
)
def test_a_continued_message_says_whether_it_reasons(content: str, reasoning: Reasoning) -> None:
    turns = [said("user", "<think>"), said("assistant", content)]
    assert encoder_of(CLOSING).encode_chat(turns, end=ChatEnd.CONTINUED).reasoning is reasoning


@pytest.mark.parametrize(
    ("template", "last", "reason"),
    [
        (CLOSING, called(call()), "tool calls cannot be continued"),
        (
            TURNS.replace("{{ m.content }}", "{{ m.content | upper }}"),
            said("assistant", "my secret"),
            "cannot be continued",
        ),
    ],
)
def test_a_message_that_cannot_be_continued(template: str, last: dict[str, object], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        encoder_of(template).encode_chat([USER, last], end=ChatEnd.CONTINUED)
    assert caught.value.field == "messages"
    assert "secret" not in str(caught.value)
