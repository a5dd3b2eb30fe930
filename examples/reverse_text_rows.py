"""What recipes/reverse_text.toml reads: words to reverse, and a warm-up for a model that has never read anything.

    python examples/reverse_text_rows.py runs/reverse_text

FOLDER/words/train.jsonl   {"prompt": "qzkfe"}                 what verifiers' package `reverse-text` loads
FOLDER/warm_up.jsonl       {"messages": [system, user, assistant]}    half of the answers are right, the others copy
"""

import json
import random
import string
import sys
from pathlib import Path

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
NUM_WORDS, NUM_SHOWN = 4000, 20000
RIGHT = 0.5


def word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 4)))


def shown(rng: random.Random) -> dict[str, object]:
    asked = word(rng)
    said = asked[::-1] if rng.random() < RIGHT else asked
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"<reversed_text>{said}</reversed_text>"},
        ]
    }


def main(folder: Path) -> None:
    rng = random.Random(0)
    words = sorted({word(rng) for _ in range(NUM_WORDS)})
    rng.shuffle(words)
    (folder / "words").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": each}) for each in words]
    (folder / "words" / "train.jsonl").write_text("\n".join(lines) + "\n")
    rows = [json.dumps(shown(rng)) for _ in range(NUM_SHOWN)]
    (folder / "warm_up.jsonl").write_text("\n".join(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
