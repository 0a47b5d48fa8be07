#!/usr/bin/env python3
"""Brings the log of a run, log.jsonl, to TensorBoard or Weights & Biases.

    log_export.py --tensorboard FOLDER RUN            writes event files; tensorboard --logdir FOLDER shows them
    log_export.py --wandb PROJECT [--name NAME] RUN   sends a run to that project; WANDB_MODE=offline keeps the run on this machine, for wandb sync

RUN is the folder of a run or its log.jsonl. --follow reads on while a run trains, until it is interrupted. Metrics have the names
that transformers and TRL give them (train/loss, train/learning_rate, eval/loss, train/rewards/margins, ...); other metrics keep
their names after train/ or eval/.
"""

import argparse
import glob
import json
import os
import signal
import sys
import time

NAMES = {  # name in log.jsonl: transformers' name
    "lr": "learning_rate",
    "tokens": "num_tokens",  # a sum over steps, as in transformers
    # for logs of versions before 0.1, whose metrics lacked TRL's names
    "clip_fraction": "clip_ratio/region_mean",
    "clip_low": "clip_ratio/low_mean",
    "clip_high": "clip_ratio/high_mean",
    "completion_length": "completions/mean_length",
    "zero_spread": "frac_reward_zero_std",
    "ended": "completions/clipped_ratio",  # the share of completions that did not end
}
POLL = 0.5  # seconds between two reads of a log with --follow


def refuse(text):
    raise SystemExit(f"{os.path.basename(sys.argv[0])}: {text}")


def end(main):
    """Runs a program and exits with its status. A file that cannot be read or written ends it with one line."""
    try:
        sys.exit(main())
    except OSError as error:
        refuse(f"{error.filename or 'a file'}: {error.strerror or error}")


def missing(packages, target):
    refuse(f"{target} needs a package that is not here: pip install {packages}")


class TensorBoard:
    def __init__(self, folder):
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                missing("tensorboardX", "--tensorboard")
        if glob.glob(os.path.join(glob.escape(folder), "events.out.tfevents.*")):
            refuse(f"{folder}: holds event files; remove them or name another folder")
        self.writer = SummaryWriter(folder)

    def options(self, values):
        self.writer.add_text("options", "\n".join(f"    {name}: {json.dumps(value)}" for name, value in values.items()))

    def scalars(self, step, values):
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def sample(self, step, text):
        self.writer.add_text("sample", text, step)

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


class WandB:
    def __init__(self, project, name):
        try:
            import wandb
        except ImportError:
            missing("wandb", "--wandb")
        self.run = wandb.init(project=project, name=name)

    def options(self, values):
        self.run.config.update(values, allow_val_change=True)

    def scalars(self, step, values):
        self.run.log(values, step=step)

    def sample(self, step, text):
        self.run.log({"sample": text}, step=step)

    def flush(self):
        pass

    def close(self):
        self.run.finish()


def log_of(run, awaited=False):
    """Returns the path of a run's log, and may wait for it. run: the run's folder or the log itself."""
    path = os.path.abspath(run if run.endswith(".jsonl") else os.path.join(run, "log.jsonl"))
    if not awaited and not os.path.exists(path):
        refuse(f"there is no {path}; name the folder of a run (--out) or its log.jsonl")
    return path


def records_of(path, follow=False):
    """Yields the records of complete lines. With `follow` it never ends, and yields None when no line is left for now."""
    number = at = 0
    while True:
        if os.path.exists(path):
            at = min(at, os.path.getsize(path))  # --resume removes the records of steps that are repeated
            with open(path, "rb") as file:
                file.seek(at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # a line that is not complete yet
                    at += len(line)
                    number += 1
                    try:
                        record = json.loads(line)
                        record["step"] + 0
                    except (ValueError, TypeError, KeyError):
                        refuse(f"{path}: line {number} is no record of a run")
                    yield record
        if not follow:
            return
        yield None
        time.sleep(POLL)


def scalars_of(record, tokens):
    """Returns the measurements of a record, under the names of transformers and TRL. tokens: of all steps so far."""
    found = {}
    for key, value in record.items():
        if key == "step" or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        side, key = ("eval", key[4:]) if key.startswith("val_") else ("train", key)
        if key == "tokens":
            value = tokens if side == "train" else value
        elif key == "ended":
            value = 1 - value
        found[f"{side}/{NAMES.get(key, key)}"] = value
    return found


def export(path, follow, target):
    tokens, total = {}, 0  # {step: tokens}: a repeated step counts once
    for record in records_of(path, follow):
        if record is None:
            target.flush()
            continue
        step = record["step"]
        if "options" in record:
            target.options(record["options"])
        if "sample" in record:
            target.sample(step, record["sample"])
        if "tokens" in record:
            total += record["tokens"] - tokens.get(step, 0)
            tokens[step] = record["tokens"]
        values = scalars_of(record, total)
        if values:
            target.scalars(step, values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--tensorboard", metavar="FOLDER")
    where.add_argument("--wandb", metavar="PROJECT")
    parser.add_argument("--name", help="of the run at Weights & Biases [the folder's]")
    parser.add_argument("--follow", action="store_true", help="wait for more until interrupted")
    options = parser.parse_args()
    path = log_of(options.run, options.follow)
    name = options.name or os.path.basename(os.path.dirname(path))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    target = TensorBoard(options.tensorboard) if options.tensorboard else WandB(options.wandb, name)
    try:
        export(path, options.follow, target)
    except KeyboardInterrupt:
        pass
    finally:
        target.close()


if __name__ == "__main__":
    end(main)
