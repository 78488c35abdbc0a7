"""Self-consistency: requests eight answers to one question, and counts how many agree.

Needs `pip install openai` and a running server (make serve). Usage: python examples/best_of_eight.py
"""

import argparse
import re
from collections import Counter

from openai import OpenAI

QUESTION = "What is 7 + 8? Answer with the number only."
"""A question to which SmolLM2-135M gives the right answer in about two of three samples."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", default=QUESTION, help="a question whose answer is a number")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the API")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": arguments.question}],
        n=8,
        temperature=0.5,
        max_tokens=80,
    )
    numbers = [last_number(choice.message.content or "") for choice in answer.choices]
    for number, votes in Counter(numbers).most_common():
        print(f"{votes} of {len(numbers)}: {number}")


def last_number(text: str) -> str:
    """Returns the last number in the text of a choice."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text)
    return found[-1] if found else "no number"


if __name__ == "__main__":
    main()
