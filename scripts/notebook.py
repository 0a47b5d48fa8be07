#!/usr/bin/env python3
"""notebook.py: writes scripts/recipes/colab.ipynb from the cells below; --check: exit status 1 if the file is another. A text is a cell
of Markdown, text after %%bash a cell that a test runs on a CPU."""

import json
import os
import sys

from log_export import end

PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "recipes", "colab.ipynb")
CELLS = [
    """# Tune Qwen3-0.6B on conversations

On a GPU with bf16 (an L4, A100 or H100; not a T4). Upload the wheel of a release to this folder first:
`streambp_c-VERSION+cuda-py3-none-PLATFORM.whl`.""",
    """%%bash
wheel=$(ls "$PWD"/streambp_c-*.whl | tail -n 1)
pip install --quiet "streambp-c[cuda] @ file://$wheel" huggingface_hub
streambp --version""",
    "## Is this machine fit?\n\n`doctor` checks the driver, the libraries, rates and every operation.",
    "%%bash\nstreambp doctor --quiet",
    "## Will it fit?\n\nThe plan for the memory that is free on this card. Nothing is downloaded or allocated for it.",
    """%%bash
free=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits 2>/dev/null | head -n 1)
streambp plan --init qwen3-0.6b --lora-rank 16 --seq-len 8192 ${free:+--memory-limit ${free}MiB}""",
    "## A model, and sample data\n\nA line is a conversation. Replace `conversations.jsonl` by yours.",
    """%%bash
hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B
for day in Monday Tuesday Wednesday Thursday Friday Saturday Sunday; do
    for time in morning noon evening night; do
        echo '{"messages": [{"role": "user", "content": "How is the weather on '$day' '$time'?"},'\\
            '{"role": "assistant", "content": "On '$day' '$time' the sun shines."}]}'
    done
done >conversations.jsonl
streambp prepare --tokenizer Qwen3-0.6B --out shards --val-fraction 0.1 conversations.jsonl""",
    "## Tune\n\nLoRA of rank 16. The same command continues a run that was stopped.",
    """%%bash
streambp train --model Qwen3-0.6B --data 'shards/train-*.bin' --val-data 'shards/val-*.bin' --lora-rank 16 --lr 2e-4 \\
    --epochs 3 --out run --resume auto""",
    "## Ask\n\nThen a folder for transformers, with the adapters merged.",
    """%%bash
streambp sample --model run --chat --prompt 'How is the weather on Friday night?' --max-new-tokens 64 --temperature 0
streambp convert --model run --out Qwen3-0.6B-tuned""",
]


def notebook():
    cells = []
    for i, text in enumerate(CELLS):
        cell = {"id": f"cell-{i}", "cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}
        cells.append(cell | {"cell_type": "code", "execution_count": None, "outputs": []} if text.startswith("%%") else cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": cells, "metadata": {"accelerator": "GPU", "kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def main():
    if sys.argv[1:] == ["--check"]:
        with open(PATH, encoding="utf-8") as file:
            if file.read() != notebook():
                raise SystemExit("notebook.py: scripts/recipes/colab.ipynb is not made of these cells; type: scripts/notebook.py")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        with open(PATH, "w", encoding="utf-8") as file:
            file.write(notebook())


if __name__ == "__main__":
    end(main)
