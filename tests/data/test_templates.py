"""The loss mask on the chat templates of 14 public models and on short ones of our own, against truth marked by hand.

⟦ and ⟧ stand around what the assistant wrote, its end-of-turn token included. `None` for a turn means that it must not be supervised,
because the template renders it otherwise than the target is served: thoughts dropped, another opening, a tool call left out.
"""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from draftsmith.data.chat import ChatFormat, encode_record
from draftsmith.data.text import parse_record
from draftsmith.types import Document
from tests.conftest import PLAIN_TEMPLATE, REWRITING_TEMPLATE, byte_tokenizer

TEMPLATES = Path(__file__).parents[3] / "shared" / "chat_templates"
DAY = date(2026, 1, 2)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOL = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "d",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    },
}
CALL = {"id": "c23456789", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
CHATS: dict[str, dict[str, Any]] = {
    "single": {"messages": [said("user", "Say hi"), said("assistant", "Hi there")]},
    "thinking": {
        "messages": [
            said("user", "One?"),
            said("assistant", "<think>\nplan A\n</think>\n\nAlpha"),
            said("user", "Two?"),
            said("assistant", "<think>\nplan B\n</think>\n\nBeta"),
        ]
    },
    "system": {"messages": [said("system", "Be brief"), said("user", "Go"), said("assistant", "Done")]},
    "tools": {
        "messages": [
            said("user", "Time?"),
            said("assistant", "", tool_calls=[CALL]),
            said("tool", "noon", name="clock", tool_call_id="c23456789"),
            said("assistant", "It is noon"),
        ],
        "tools": [TOOL],
    },
}
IM = "<|im_start|>assistant\n"
THOUGHT = "<think>\nplan {}\n</think>\n\n"
KEPT = ["⟦<think>\nplan A\n</think>\n\nAlpha{}⟧", "⟦<think>\nplan B\n</think>\n\nBeta{}⟧"]


def kept(before: str, end: str) -> list[str]:
    """Both thinking turns as the row has them."""
    return [before + text.format(end) for text in KEPT]


# Of each model: its end-of-turn tokens, and of three chats what is supervised, turn by turn.
TRUTH: dict[str, tuple[list[str], dict[str, list[str | None]]]] = {
    "GLM-4.6": (
        ["<|user|>", "<|endoftext|>", "<|observation|>"],
        {
            "single": ["<|assistant|>⟦\n<think></think>\nHi there⟧"],
            "thinking": [None, "<|assistant|>⟦\n<think>plan B</think>\nBeta⟧"],
            "tools": [
                "<|assistant|>⟦\n<think></think>\n<tool_call>clock\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n</tool_call><|observation|>⟧\n",
                "<|assistant|>⟦\n<think></think>\nIt is noon⟧",
            ],
        },
    ),
    "HuggingFaceTB-SmolLM3-3B": (
        ["<|im_end|>"],
        {
            "single": [IM + "⟦Hi there<|im_end|>⟧\n"],
            "thinking": kept(IM, "<|im_end|>"),
            "tools": [None, IM + "⟦It is noon<|im_end|>⟧\n"],
        },
    ),
    "Kimi-K2-Instruct": (
        ["<|im_end|>"],
        {
            "single": ["assistant<|im_middle|>⟦Hi there<|im_end|>⟧"],
            "thinking": kept("assistant<|im_middle|>", "<|im_end|>"),
            "system": [
                "Be brief<|im_end|><|im_user|>user<|im_middle|>Go<|im_end|><|im_assistant|>assistant<|im_middle|>⟦Done<|im_end|>⟧"
            ],
        },
    ),
    "Qwen-Qwen2.5-7B-Instruct": (
        ["<|im_end|>"],
        {
            "single": [IM + "⟦Hi there<|im_end|>⟧\n"],
            "thinking": kept(IM, "<|im_end|>"),
            "tools": [
                IM + '⟦<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call><|im_end|>⟧\n',
                IM + "⟦It is noon<|im_end|>⟧\n",
            ],
        },
    ),
    "Qwen-Qwen3-0.6B": (
        ["<|im_end|>"],
        {
            "single": [IM + "⟦<think>\n\n</think>\n\nHi there<|im_end|>⟧\n"],
            "thinking": [None, IM + "⟦<think>\nplan B\n</think>\n\nBeta<|im_end|>⟧\n"],
            # Rendered last, the call carries empty thoughts; inside the chat it carries none.
            "tools": [None, IM + "⟦<think>\n\n</think>\n\nIt is noon<|im_end|>⟧\n"],
        },
    ),
    "Qwen3.5-4B": (
        ["<|im_end|>"],
        {
            "single": [IM + "<think>\n⟦\n</think>\n\nHi there<|im_end|>⟧\n"],
            "thinking": [None, IM + "<think>\n⟦plan B\n</think>\n\nBeta<|im_end|>⟧\n"],
            "tools": [
                IM
                + "<think>\n⟦\n</think>\n\n<tool_call>\n<function=clock>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call><|im_end|>⟧\n",
                IM + "<think>\n⟦\n</think>\n\nIt is noon<|im_end|>⟧\n",
            ],
        },
    ),
    # It is served with its thoughts opened, and renders answers without any.
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (
        ["<｜end▁of▁sentence｜>"],
        {"single": [None], "thinking": [None, None], "system": [None]},
    ),
    "deepseek-ai-DeepSeek-V3.1": (
        ["<｜end▁of▁sentence｜>"],
        {
            "single": ["<｜Assistant｜><think></think>⟦Hi there<｜end▁of▁sentence｜>⟧"],
            "thinking": [None, None],
            "tools": [
                '<think></think>⟦<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{"zone": "UTC"}<｜tool▁call▁end｜>'
                "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>⟧",
                "noon<｜tool▁output▁end｜>⟦It is noon<｜end▁of▁sentence｜>⟧",
            ],
        },
    ),
    "google-gemma-2-2b-it": (
        ["<end_of_turn>", "<eos>"],
        {
            "single": ["<start_of_turn>model\n⟦Hi there<end_of_turn>⟧\n"],
            "thinking": kept("<start_of_turn>model\n", "<end_of_turn>"),
            "system": [],
        },
    ),
    # Without thinking it is served with empty thoughts opened, which its history does not show.
    "google-gemma-4-31B-it": (
        ["<turn|>", "<eos>"],
        {
            "single": [None],
            "thinking": [None, None],
            "tools": [None, '{value:<|"|>noon<|"|>}<tool_response|>⟦It is noon<turn|>⟧\n'],
        },
    ),
    "meta-llama-Llama-3.1-8B-Instruct": (
        ["<|eot_id|>", "<|eom_id|>"],
        {
            "single": ["assistant<|end_header_id|>\n\n⟦Hi there<|eot_id|>⟧"],
            "thinking": kept("assistant<|end_header_id|>\n\n", "<|eot_id|>"),
            "tools": [
                'assistant<|end_header_id|>\n\n⟦{"name": "clock", "parameters": {"zone": "UTC"}}<|eot_id|>⟧',
                "assistant<|end_header_id|>\n\n⟦It is noon<|eot_id|>⟧",
            ],
        },
    ),
    "microsoft-Phi-3.5-mini-instruct": (
        ["<|end|>", "<|endoftext|>"],
        {
            "single": ["<|assistant|>\n⟦Hi there<|end|>⟧\n"],
            "thinking": kept("<|assistant|>\n", "<|end|>"),
            "system": ["<|system|>\nBe brief<|end|>\n<|user|>\nGo<|end|>\n<|assistant|>\n⟦Done<|end|>⟧\n"],
        },
    ),
    "mistralai-Mistral-Nemo-Instruct-2407": (
        ["</s>"],
        {
            "single": ["[INST]Say hi[/INST]⟦Hi there</s>⟧"],
            "thinking": kept("[/INST]", "</s>"),
            # The system text stands in the last user turn only while that is the chat's last turn.
            "system": [None],
        },
    ),
    "openai-gpt-oss-120b": (
        ["<|return|>", "<|call|>", "<|endoftext|>"],
        {
            "single": ["<|start|>assistant⟦<|channel|>final<|message|>Hi there<|return|>⟧"],
            # Earlier turns are closed by another token than the target writes, so that one is left out.
            "thinking": [
                "<|start|>assistant⟦<|channel|>final<|message|><think>\nplan A\n</think>\n\nAlpha⟧<|end|>",
                "<|start|>assistant⟦<|channel|>final<|message|><think>\nplan B\n</think>\n\nBeta<|return|>⟧",
            ],
            "tools": [
                '<|start|>assistant⟦ to=functions.clock<|channel|>commentary json<|message|>{"zone": "UTC"}<|call|>⟧',
                "<|start|>assistant⟦<|channel|>final<|message|>It is noon<|return|>⟧",
            ],
        },
    ),
}
CASES = [(model, chat) for model, (_, chats) in TRUTH.items() for chat in chats]


def spoken(template: str, ends: list[str], **options: Any) -> ChatFormat:
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *ends]})
    tokenizer.eos_token = ends[-1] if "<|end|>" in ends else ends[0]
    return ChatFormat(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(end) for end in ends), DAY, options)


def marked(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    """The whole chat as text, with the supervised runs in brackets."""
    text, inside = "", False
    runs: list[tuple[bool, list[int]]] = []
    for token, supervised in zip(document.ids.tolist(), document.loss_mask.tolist(), strict=True):
        if not runs or runs[-1][0] != supervised:
            runs.append((supervised, []))
        runs[-1][1].append(token)
    for inside, ids in runs:
        piece = str(tokenizer.decode(ids))
        text += f"⟦{piece}⟧" if inside else piece
    return text


def check(chat: ChatFormat, row: dict[str, Any], turns: list[str | None]) -> None:
    record = parse_record(row, "row")
    document, rewritten = encode_record(chat, record)
    shown = marked(chat.tokenizer, document)
    expected = [turn for turn in turns if turn is not None]
    for turn in expected:
        assert turn in shown
    assert shown.count("⟦") == len(expected)
    assert rewritten == turns.count(None)
    whole = chat.tokenizer.apply_chat_template(
        list(record.messages or ()), tools=row.get("tools"), tokenize=True, return_dict=False, strftime_now=DAY.strftime
    )
    assert document.ids.tolist() == list(whole), "report 15: the tokens are those of the tokenizer's own template"


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the folder of public chat templates is not beside the project")
@pytest.mark.parametrize(("model", "chat"), CASES, ids=[f"{model}-{chat}" for model, chat in CASES])
def test_public_templates(model: str, chat: str) -> None:
    ends, chats = TRUTH[model]
    spoken_as = spoken((TEMPLATES / f"{model}.jinja").read_text(encoding="utf-8"), ends)
    if not chats[chat]:
        with pytest.raises(TemplateError, match="System role not supported"):
            encode_record(spoken_as, parse_record(CHATS[chat], "row"))
        return
    check(spoken_as, CHATS[chat], chats[chat])


def test_three_chats_of_every_public_template_are_marked() -> None:
    if TEMPLATES.is_dir():
        assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(TRUTH)
    assert all(len(chats) == 3 for _, chats in TRUTH.values())


@pytest.mark.skipif(not TEMPLATES.is_dir(), reason="the folder of public chat templates is not beside the project")
@pytest.mark.parametrize(
    ("model", "thinking", "turn"),
    [
        ("Qwen-Qwen3-0.6B", True, IM + "⟦<think>\n\n</think>\n\nHi there<|im_end|>⟧\n"),
        ("Qwen-Qwen3-0.6B", False, IM + "<think>\n\n</think>\n\n⟦Hi there<|im_end|>⟧\n"),
        ("Qwen3.5-4B", False, IM + "<think>\n\n</think>\n\n⟦Hi there<|im_end|>⟧\n"),
        ("GLM-4.6", False, "Say hi/nothink<|assistant|>\n<think></think>⟦\nHi there⟧"),
        ("google-gemma-4-31B-it", True, "<|turn>model\n⟦Hi there<turn|>⟧\n"),
    ],
)
def test_report_15_thinking_is_rendered_as_it_is_served(model: str, thinking: bool, turn: str) -> None:
    template = (TEMPLATES / f"{model}.jinja").read_text(encoding="utf-8")
    ends = TRUTH[model][0]
    by_config, by_row = spoken(template, ends, enable_thinking=thinking), spoken(template, ends, enable_thinking=not thinking)
    row = {**CHATS["single"], "chat_template_kwargs": {"enable_thinking": thinking}}
    for chat, told in ((by_config, CHATS["single"]), (by_row, row)):
        record = parse_record(told, "row")
        document, _ = encode_record(chat, record)
        assert turn in marked(chat.tokenizer, document)
        assert document.ids.tolist() == list(
            chat.tokenizer.apply_chat_template(
                list(record.messages or ()),
                tokenize=True,
                return_dict=False,
                enable_thinking=thinking,
                strftime_now=DAY.strftime,
            )
        )
    # What the target is given when it is served is what stands before the supervised tokens.
    served = by_config.prompt(CHATS["single"]["messages"][:1])
    assert document.ids.tolist()[: len(served)] == served
    assert not document.loss_mask[: len(served)].any()
    assert document.loss_mask[len(served)]


# Short templates of our own, each with one trait that public ones have.
DROPS_TOOLS = PLAIN_TEMPLATE
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments.zone }})</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FOLDED_SYSTEM = (
    "{% set lead = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}{% set lead.text = m.content ~ '\n' %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ lead.text if m.role == 'user' else '' }}{% if m.role == 'user' %}{% set lead.text = '' %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED_BY_NEXT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CLOSED_ANEW = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '<|done|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "ends", "chat", "turns"),
    [
        (PLAIN_TEMPLATE, ["<|im_end|>"], "thinking", kept(IM, "<|im_end|>")),
        (REWRITING_TEMPLATE, ["<|im_end|>"], "thinking", [None, kept(IM, "<|im_end|>")[1]]),
        (DROPS_TOOLS, ["<|im_end|>"], "tools", [None, IM + "⟦It is noon<|im_end|>⟧\n"]),
        (WITH_TOOLS, ["<|im_end|>"], "tools", [IM + "⟦<call>clock(UTC)</call><|im_end|>⟧\n", IM + "⟦It is noon<|im_end|>⟧\n"]),
        (FOLDED_SYSTEM, ["<|im_end|>"], "system", ["<|im_start|>user\nBe brief\nGo<|im_end|>\n" + IM + "⟦Done<|im_end|>⟧\n"]),
        (
            OPENED_BY_NEXT,
            ["<|user|>"],
            "thinking",
            ["<|assistant|>⟦<think>\nplan A\n</think>\n\nAlpha<|user|>⟧Two?", "<|assistant|>" + KEPT[1].format("")],
        ),
        (CLOSED_ANEW, ["<|done|>"], "thinking", [IM + KEPT[0].format("") + "<|im_end|>", IM + KEPT[1].format("<|done|>")]),
    ],
    ids=["kept", "rewritten", "tool call left out", "tools", "system folded", "opened by the next", "closed anew"],
)
def test_templates_of_our_own(template: str, ends: list[str], chat: str, turns: list[str | None]) -> None:
    check(spoken(template, ends), CHATS[chat], turns)
