"""The sets that drafters are usually measured on, by their short names; they come from the Hugging Face hub."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

BOXED = "\nReason step by step, and put the final answer into \\boxed{}."
CODE = "Complete this Python function. Answer with the whole function in a code block.\n\n"


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies on the hub, and what a user would ask for one of its rows."""

    path: str
    config: str | None
    split: str
    question: Callable[[Mapping[str, Any]], str]

    def row(self, found: Mapping[str, Any], name: str) -> dict[str, Any]:
        """A row as chats have it; its category is its own, or the set's name."""
        return {"messages": [{"role": "user", "content": self.question(found)}], "category": found.get("category") or name}


SETS = {
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", lambda row: row["question"] + BOXED),
    "math500": PromptSet("HuggingFaceH4/MATH-500", None, "test", lambda row: row["problem"] + BOXED),
    "humaneval": PromptSet("openai/openai_humaneval", None, "test", lambda row: f"{CODE}```python\n{row['prompt']}\n```"),
    "mbpp": PromptSet(
        "google-research-datasets/mbpp",
        "full",
        "test",
        lambda row: f"{row['text']}\nThe code must pass these tests:\n```python\n" + "\n".join(row["test_list"]) + "\n```",
    ),
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"][0]),
}
