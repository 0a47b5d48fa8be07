"""Ten steps of the double build beside TRL's own KTOTrainer, DPOTrainer and GRPOTrainer in float64: losses, metrics and weights. TRL's head
computes in float32 whatever the model is; here log-probabilities and entropies are torch's. Completions of GRPO are given, with rewards.
Trajectories are ours: TRL trains on the tokens, masks and rewards of our rollouts.jsonl.
test_trl_steps.py TRAIN WORK: the program of the double build, an empty folder.
"""
import dataclasses
import json
import subprocess
import sys
import unittest.mock

from checks import TRAIN, WORK, check, close, train, write_shard

sys.path[1:1] = ["test/golden", "data"]

import numpy as np  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import encode  # noqa: E402
import shards  # noqa: E402
from make_golden import load_model, rmsnorm_in_the_models_dtype  # noqa: E402

MODEL, F64 = "test/golden/gpt2", torch.float64
BATCH, STEPS, LENGTH, LR = 4, 10, 26, 5e-3
SAME = ["--lr-scheduler-type", "linear", "--weight-decay", 0.1, "--beta2", 0.95, "--epsilon", 1e-6, "--grad-clip", 0]


def tokenizer_of(vocabulary):
    """A word for each id; the last two end a text and fill it up."""
    model = tokenizers.models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=f"t{vocabulary - 2}", pad_token=f"t{vocabulary - 1}")


def rows_of(rng, vocabulary):
    """Documents of at most LENGTH tokens; mismatched ones may be longer. Of a step the longest come first, as they are packed."""
    rows = []
    for _ in range(STEPS):
        step = []
        for _ in range(BATCH):
            prompt = rng.integers(1, 11)
            lengths = prompt, rng.integers(2, LENGTH - prompt), rng.integers(2, LENGTH - prompt)  # and a token that ends it
            words = [" ".join(f"t{i}" for i in rng.integers(0, vocabulary - 2, n)) + " " for n in lengths]
            step.append((-sum(lengths[:2]), words, bool(rng.random() < 0.6)))
        rows += [step[i] for i in sorted(range(BATCH), key=lambda i: step[i][0])]
    return rows


def shard_of(kind, rows, vocabulary, group=1):
    documents, columns = [], ("chosen_ids", "rejected_ids") if kind == shards.PAIRS else ("completion_ids",)
    for row in rows:
        prompt = row["prompt_ids"]
        for completion in (row[column] for column in columns):
            counts = np.arange(len(prompt) + len(completion)) >= len(prompt)
            documents.append(encode.Document(np.array(prompt + completion), counts.astype(np.uint8), len(prompt), float(row.get("label", 0))))
    return write_shard(f"kind-{kind}", kind, vocabulary, documents, [len(columns) * group] * (len(rows) // group))


class Head:
    @staticmethod
    def apply(hidden, weight, _bias, labels, *_):
        logits = hidden @ weight.T
        logp = torch.log_softmax(logits, -1)
        none = torch.zeros_like(labels)
        return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1).detach(), none, none, none


class Recorded:
    lines = None

    def compute_loss(self, *arguments, **named):
        loss = super().compute_loss(*arguments, **named)
        self.lines.append({"loss": loss.item(), **{key: values[-1] for key, values in self._metrics["train"].items()}})
        return loss


class Kto(Recorded, trl.KTOTrainer):
    pass


class Dpo(Recorded, trl.DPOTrainer):
    pass


class Grpo(Recorded, trl.GRPOTrainer):
    pass


class Paths(Grpo):
    """Trains on given rows (prompt, completion, mask, advantage of each token of the completion)."""
    def _prepare_inputs(self, _):
        rows = self.steps[len(self.lines)]
        pad = lambda column, value, kind: torch.tensor(
            [[*row[column], *[value] * (max(len(other[1]) for other in rows) - len(row[1]))] for row in rows], dtype=kind)
        mask, prompts = pad(2, 0, torch.long), torch.tensor([row[0] for row in rows])
        present = torch.tensor([[i < len(row[1]) for i in range(mask.shape[1])] for row in rows], dtype=torch.long)
        return {"prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": pad(1, 0, torch.long),
                "completion_mask": present, "tool_mask": mask, "advantages": pad(3, 0.0, F64), "num_items_in_batch": mask.sum()}


SETTINGS = dict(
    max_steps=STEPS, learning_rate=LR, lr_scheduler_type="linear", weight_decay=0.1, adam_beta2=0.95, adam_epsilon=1e-6, max_grad_norm=0,
    gradient_checkpointing=False, use_cpu=True, bf16=False, save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1)


def steps_agree(what, run, trainer, exact, metrics=None, model=MODEL, shared=5):
    """metrics: how exact they are, where TRL has some in float32. shared: least metrics of a step that both have"""
    with open(f"{run}/log.jsonl") as log:
        ours = [line for line in map(json.loads, log) if "loss" in line]
    check(f"{what}: {STEPS} steps", len(ours) == len(trainer.lines) == STEPS)
    for step, (our, their) in enumerate(zip(ours, trainer.lines), 1):
        for key in (our.keys() & their.keys()) - {"rewards/accuracies"}:  # of equal rewards rounding decides
            allowed = exact if key == "loss" or not metrics else metrics
            near = our[key] is not None and abs(our[key] - their[key]) <= allowed * max(1, abs(their[key]))
            check(f"{what}, step {step}: {key}", near, f"{our[key]}, not {their[key]}")
    both = sum(len(our.keys() & their.keys()) for our, their in zip(ours, trainer.lines))
    check(f"{what}: metrics of the same names", both >= shared * STEPS, f"{both}")
    train("convert", "--model", run, "--out", f"{run}-hf", "--quiet")
    found = load_file(f"{run}-hf/model.safetensors")
    theirs = {key: value.detach() for key, value in trainer.model.state_dict().items() if key in found}
    start = load_model(model, F64, "sdpa").state_dict()
    moved = max(float((theirs[key] - start[key]).abs().max()) for key in theirs)
    worst = max(float((found[key].to(F64) - theirs[key]).abs().max()) for key in theirs)
    check(f"{what}: weights", moved > 1e-2 and worst <= exact, f"{worst:.3g} apart, {moved:.3g} from the start")


def compare(what, trainer_kind, config, columns, more, kind, options, exact):
    """columns(words, label): a row for TRL; more: its settings; options: ours."""
    model, reference = (load_model(MODEL, F64, "sdpa").train() for _ in range(2))
    vocabulary, run = model.config.vocab_size, f"{WORK}/{what.replace(' ', '-')}"
    arguments = config(
        output_dir=f"{run}-trl", per_device_train_batch_size=BATCH, max_length=LENGTH, train_sampling_strategy="sequential", **SETTINGS, **more)
    dataset = Dataset.from_list([columns(words, label) for _, words, label in rows_of(np.random.default_rng(9), vocabulary)])
    trainer = trainer_kind(model, reference, args=arguments, train_dataset=dataset, processing_class=tokenizer_of(vocabulary))
    trainer.lines = []
    trainer.train()

    shard = shard_of(kind, trainer.train_dataset, vocabulary)
    train("train", "--model", MODEL, "--data", shard, "--any-tokenizer", *options, "--seq-len", LENGTH - 1, "--long", "truncate", "--batch",
          BATCH, "--samples", BATCH, "--shuffle", "off", "--steps", STEPS, "--lr", LR, *SAME, "--out", run, "--quiet")
    steps_agree(what, run, trainer, exact)
    return trainer.lines


def labelled(words, label):
    return {"prompt": words[0], "completion": words[1], "label": label}


def paired(words, _):
    return {"prompt": words[0], "chosen": words[1], "rejected": words[2]}


# Where a reference is read from a file of float32, that is how exact it is.
def compare_groups(what, options, exact, **more):
    """Two prompts a step, and four completions of each. TRL has advantages in float32, and pads shorter prompts on the left without telling
    gpt2, whose positions are learned: here prompts are of one length."""
    prompts, group = 2, 4
    model, rng, run = load_model(MODEL, F64, "sdpa").train(), np.random.default_rng(9), f"{WORK}/{what}"
    vocabulary, rows, taken = model.config.vocab_size, [], []
    tokenizer = tokenizer_of(vocabulary)
    for _ in range(STEPS * prompts):
        prompt = rng.integers(0, vocabulary - 2, 6).tolist()
        for _ in range(group):
            completion = rng.integers(0, vocabulary - 2, rng.integers(1, LENGTH - 1 - len(prompt))).tolist()
            rows.append({"prompt_ids": prompt, "completion_ids": [*completion, tokenizer.eos_token_id], "label": np.float32(rng.normal())})

    def rollout(texts, _):
        taken[:] = rows[len(trainer.lines) * prompts * group :][: len(texts)]
        return {**{key: [row[key] for row in taken] for key in ("prompt_ids", "completion_ids")}, "logprobs": None}

    def reward(completion_ids, **_):
        assert [row["completion_ids"] for row in taken] == [list(ids) for ids in completion_ids]
        return [float(row["label"]) for row in taken]

    arguments = trl.GRPOConfig(
        output_dir=f"{run}-trl", per_device_train_batch_size=prompts * group, num_generations=group, shuffle_dataset=False,
        max_completion_length=LENGTH, disable_dropout=True, **more, **SETTINGS)
    dataset = Dataset.from_list([{"prompt": f"t{i}"} for i in range(STEPS * prompts)])
    trainer = Grpo(model, reward, args=arguments, train_dataset=dataset, processing_class=tokenizer, rollout_func=rollout)
    trainer.lines = []
    if trainer.ref_model:
        trainer.ref_model.double()
    trainer.train()
    shard = shard_of(shards.GROUPS, rows, vocabulary, group)
    train("train", "--model", MODEL, "--data", shard, "--any-tokenizer", *options, "--seq-len", LENGTH, "--batch", prompts * group, "--samples",
          prompts, "--shuffle", "off", "--steps", STEPS, "--lr", LR, "--max-new-tokens", LENGTH, *SAME, "--out", run, "--quiet")
    steps_agree(what, run, trainer, exact, 1e-6)


AGENT = """  # environment and renderer, whose answers follow from the line; with `forks` half of the renderings drop ids at the end
import json, random, sys
for line in sys.stdin:
    asked, draw = json.loads(line), random.Random(line)
    if "said" in asked:
        answer = {"message": {"role": "assistant", "content": "", "raw": str(asked["said"])}}
    elif "ids" in asked:
        answer = {"keep": len(asked["ids"]) - draw.randrange(1, 6) * (sys.argv[1] == "forks" and draw.random() < 0.5),
                  "ids": draw.choices(range(100), k=draw.randrange(1, 5))}
    else:
        answer = {"messages": [{"role": "tool", "content": str(draw.random())}], "done": draw.random() < 0.3}
        if asked["turn"] == 1 or draw.random() < 0.7:
            answer["reward"] = draw.choice([0, 0.25, 1])
    print(json.dumps(answer), flush=True)
"""


def paths_of(line):
    """Returns [(ids, mask, reward of each trained id)] of the paths of a trajectory in rollouts.jsonl."""
    found, following = [], None
    for path in reversed(line["paths"]):
        following = (following or [])[:path.get("kept", 0)] + path["ids"]
        mask, reward = [0] * len(following), [0.0] * len(following)
        for (begin, end), value in zip(path["trained"], path["rewards"]):
            mask[begin:end], reward[begin:end] = [1] * (end - begin), [value or 0.0] * (end - begin)
        found.append((following, mask, reward))
    return found


def compare_trajectories(what, options, forks, own, **more):
    """Two tasks a step, and four trajectories of each. Forked paths are rows of their own, so their losses are compared where TRL weighs
    every token alike; advantages of turns are given, as TRL has none."""
    model_path, prompts, group, prompt = "test/golden/llama", 2, 4, 40  # tokens that no fork drops
    model, run = load_model(model_path, F64, "sdpa").train(), f"{WORK}/{what.replace(' ', '-')}"
    vocabulary, rng = model.config.vocab_size, np.random.default_rng(9)
    rows = [{"prompt_ids": rng.integers(0, 100, prompt + 30).tolist(), "completion_ids": []} for _ in range(STEPS * prompts)]
    with open(f"{WORK}/agent.py", "w") as file:
        file.write(AGENT)
    command = f"exec '{sys.executable}' '{WORK}/agent.py' {'forks' if forks else 'appends'}"
    train("train", "--model", model_path, "--data", shard_of(shards.PROMPTS, rows, vocabulary), "--any-tokenizer", "--rollout", *options,
          "--environment-command", command, "--render-command", command, "--turn-rewards", "own" if own else "sum", "--max-turns", 5,
          "--max-new-tokens", 6, "--stop-ids", ",".join(map(str, range(0, vocabulary, 3))), "--seq-len", 160, "--batch", prompts, "--group-size", group,
          "--shuffle", "off", "--steps", STEPS, "--lr", LR, *SAME, "--out", run, "--quiet")
    with open(f"{run}/rollouts.jsonl") as file:
        lines = list(map(json.loads, file))
    check(f"{what}: turns", sum(line["turns"] for line in lines) > 2 * len(lines))
    check(f"{what}: forks", forks == any(len(line["paths"]) > 1 for line in lines))
    for line in lines:
        line["rows"] = paths_of(line)

    def rollout(texts, _):
        taken = lines[len(trainer.lines) * prompts * group:][:len(texts)]
        return {"prompt_ids": [line["rows"][0][0][:prompt] for line in taken], "completion_ids": [line["rows"][0][0][prompt:] for line in taken],
                "env_mask": [line["rows"][0][1][prompt:] for line in taken], "logprobs": None, "worth": [line["reward"] for line in taken]}

    arguments = trl.GRPOConfig(
        output_dir=f"{run}-trl", per_device_train_batch_size=prompts * group, num_generations=group, shuffle_dataset=False,
        max_completion_length=160, disable_dropout=True, **more, **SETTINGS)
    dataset = Dataset.from_list([{"prompt": f"t{i}"} for i in range(STEPS * prompts)])
    trainer = (Paths if forks or own else Grpo)(model, lambda worth, **_: worth, args=arguments, train_dataset=dataset,
                                                processing_class=tokenizer_of(vocabulary), rollout_func=rollout)
    trainer.lines, trainer.steps = [], []
    for begin in range(0, len(lines), group):
        trajectories = lines[begin:begin + group]
        rewards = np.array([value or 0.0 for line in trajectories for path in line["paths"] for value in path["rewards"]] if own else
                           [line["reward"] for line in trajectories])
        of = lambda reward: (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        if begin % (prompts * group) == 0:
            trainer.steps.append([])
        trainer.steps[-1] += [(ids[:prompt], ids[prompt:], mask[prompt:], [of(value if own else line["reward"]) for value in reward[prompt:]])
                              for line in trajectories for ids, mask, reward in line["rows"]]
    if trainer.ref_model:
        trainer.ref_model.double()
    trainer.train()
    steps_agree(what, run, trainer, 5e-5, 1e-6, model_path, 2 if forks or own else 5)  # advantages of float32, after AdamW


with rmsnorm_in_the_models_dtype(), unittest.mock.patch("trl.trainer.utils._ChunkedLogProbFunction", Head):
    lines = compare("kto", Kto, trl.KTOConfig, labelled, {"beta": 0.3, "undesirable_weight": 0.8}, shards.LABELS,
                    ["--objective", "kto", "--beta", 0.3, "--undesirable-weight", 0.8], 1e-9)
    check("a divergence above 0, and of 0", 1 < sum(line["kl"] > 0 for line in lines) < STEPS, str([line["kl"] for line in lines]))
    compare("kto apo_zero", Kto, trl.KTOConfig, labelled, {"beta": 0.3, "loss_type": "apo_zero_unpaired"}, shards.LABELS,
            ["--objective", "kto", "--beta", 0.3, "--kto-loss", "apo_zero"], 1e-6)
    compare("dpo robust", Dpo, trl.DPOConfig, paired, {"beta": 0.2, "loss_type": ["robust"], "label_smoothing": 0.1}, shards.PAIRS,
            ["--objective", "dpo", "--beta", 0.2, "--dpo-loss", "robust", "--label-smoothing", 0.1], 5e-6)
    compare_groups("grpo", ["--objective", "grpo", "--beta", 0.1], 5e-6, loss_type="grpo", beta=0.1)
    compare_groups("dapo", ["--objective", "grpo", "--normalisation", "bnpo"], 5e-6, loss_type="dapo")
    compare_groups("gspo", ["--objective", "gspo"], 5e-6, loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4)
    compare_groups("cispo", ["--objective", "cispo"], 5e-6, loss_type="cispo", epsilon_high=5.0)
    compare_trajectories("trajectories", ["--objective", "grpo", "--beta", 0.1], False, False, loss_type="grpo", beta=0.1)
    compare_trajectories("trajectories gspo", ["--objective", "gspo"], False, False, loss_type="grpo", importance_sampling_level="sequence")
    compare_trajectories("trajectories own", ["--objective", "grpo"], False, True, loss_type="grpo")
    compare_trajectories("trajectories forks", ["--objective", "grpo", "--normalisation", "bnpo"], True, False, loss_type="dapo")
    compare_trajectories("trajectories forks own", ["--objective", "cispo"], True, True, loss_type="cispo", epsilon_high=5.0)
configs = trl.SFTConfig, trl.DPOConfig, trl.KTOConfig, trl.GRPOConfig, trl.ScriptArguments, trl.ModelConfig
names = {field.name for config in configs for field in dataclasses.fields(config)} | {"warmup_ratio", "torch_dtype", "target_modules"}
unknown = [name for name in sorted(names) if "unknown option" in subprocess.run([TRAIN, "--" + name], capture_output=True, text=True).stderr]
check("an answer to every option of TRL's trainers", not unknown, " ".join(unknown))
close()
