"""A contender for test_compare.sh: what our own program says of the same pass, falsified as the environment asks.

FAKE_LOSS, FAKE_GRADIENT: factors. FAKE_LONGEST: no longer T fits. FAKE_PEAK: bytes of a token, in place of the measured
peak. FAKE_BREAK: exit, garbage, short or sleep. FAKE_CALLS: a file that gets a line for every process.
"""

import argparse
import array
import json
import os
import struct
import subprocess
import sys
import time

VALUES = (
    "--model --tokens --seq-len --batch --dtype --device --repeat --chunk --logits-chunk --threads --memory-limit"
    " --grads-out --grads-of"
)


def scale_gradients(path, factor):
    with open(path, "rb") as file:
        head = file.read(8)
        header = file.read(struct.unpack("<Q", head)[0])
        values = array.array("f", file.read())
    with open(path, "wb") as file:
        file.write(head + header + array.array("f", (factor * x for x in values)).tobytes())


def main():
    parser = argparse.ArgumentParser()
    for name in VALUES.split():
        parser.add_argument(name)
    o = parser.parse_args()
    factor, broken = (os.environ.get(name) for name in ("FAKE_GRADIENT", "FAKE_BREAK"))
    if os.environ.get("FAKE_CALLS"):
        with open(os.environ["FAKE_CALLS"], "a") as file:
            print(o.seq_len, "chunk", o.chunk, "limit", o.memory_limit, "gradients" if o.grads_out else "", file=file)
    if broken == "exit":
        sys.exit("fake: broken on purpose")
    if broken == "sleep":
        time.sleep(60)
    if int(o.seq_len) > int(os.environ.get("FAKE_LONGEST", 1 << 40)):
        print(json.dumps({"contender": "fake", "error": "out of memory"}))
        return
    command = f"{os.environ['TRAIN']} bp --method full --threads 1 --json --quiet --model {o.model} --data {o.tokens}"
    command += f" --seq-len {o.seq_len} --batch {o.batch} --repeat {o.repeat}"
    command += f" --grads-out {o.grads_out} --grads-of {o.grads_of}" if o.grads_out else ""
    ours = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    result = json.loads(ours.stdout)
    if factor and o.grads_out:
        scale_gradients(o.grads_out, float(factor))
    seconds = [result["seconds"]] * (1 if broken == "short" else int(o.repeat))
    peak = int(os.environ["FAKE_PEAK"]) * int(o.seq_len) if "FAKE_PEAK" in os.environ else result["peak_bytes"]
    print("noise before the result")
    print(
        "{broken"
        if broken == "garbage"
        else json.dumps(
            {
                "contender": "fake",
                "loss": float(os.environ.get("FAKE_LOSS", 1)) * result["loss"],
                "grad_norm": float(factor or 1) * result["grad_norm"],
                "seconds": seconds,
                "peak_bytes": peak,
                "peak_of": "process",
                "attention": "none of its own",
                "versions": {"fake": "1"},
                "error": None,
            }
        )
    )


if __name__ == "__main__":
    main()
