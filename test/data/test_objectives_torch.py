"""Objectives end to end against PyTorch's autograd: losses and gradients of `bp` and `eval`, the values of `logprobs`,
AdamW's steps in `train`, and what rollouts write; each objective with each family of models, of which half train adapters. More
settings of the objectives are in golden/objectives.json and test_trl_steps.py. The formulas are here once more, in float64 and of whole documents, which
go through transformers' models one at a time. test_objectives_torch.py TRAIN WORK: the program, an empty folder.
"""
import functools
import json
import sys
from dataclasses import dataclass, replace

from checks import WORK, check, close, train, write_shard

sys.path[1:1] = ["test/golden", "data"]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import encode  # noqa: E402
import shards  # noqa: E402
from make_golden import load_model, rmsnorm_in_the_models_dtype  # noqa: E402

F64 = torch.float64
TOLERANCE, GRADIENT = 1e-5, 2e-5  # relative errors allowed in fp32; of a gradient the L2 norm
MODELS = (("llama", 40, False), ("qwen3", 40, True), ("gpt2", 7, True), ("gemma3", 40, False))  # --seq-len, adapters
CHUNKS = ["--chunk", 7, "--logits-chunk", 5]
LR, DECAY, EPSILON = 2e-3, 0.1, 1e-5  # an epsilon above the rounding of a gradient, whose sign alone would count otherwise
STEPS = ["--lr", LR, "--schedule", "constant", "--weight-decay", DECAY, "--epsilon", EPSILON, "--grad-clip", 0.5]


def losses_agree(what, found, theirs):
    ours, theirs = found.get("loss"), float(theirs)
    check(f"{what}: loss", ours is not None and abs(ours - theirs) <= TOLERANCE * abs(theirs) + 1e-6, f"{ours}, not {theirs}")


def near_tensors(what, ours, theirs, tolerance):
    """Every tensor, by name, within a relative L2 error; one that is next to nothing beside the others need not be more exact."""
    floor = 1e-7 * sum(float(t.norm()) ** 2 for t in theirs.values()) ** 0.5
    wrong = [name for name in ours.keys() | theirs.keys() if name not in ours or name not in theirs or
             not float((ours[name].to(F64) - theirs[name]).norm()) <= tolerance * float(theirs[name].norm()) + floor]
    check(what, not wrong, f"{wrong[:4]} differ by more than {tolerance}")


# ---- data ------------------------------------------------------------------------------------------------------------------
@dataclass
class Document(encode.Document):
    sample: int = 0  # which pair or group it is in
    logp: torch.Tensor = None  # under a model, by target: all [tokens - 1], in float64
    reference: torch.Tensor = None
    old: torch.Tensor = None

    @property
    def m(self):
        """1: a target that counts."""
        return torch.tensor(self.counts[1:], dtype=F64)

    def sum(self, x):
        return (self.m * x).sum()

    def mean(self, x):
        return self.sum(x) / self.m.sum()


def documents_of(rng, vocabulary, kind, sizes):
    """sizes[i] documents of sample i: one prompt, answers of unequal lengths, of which some targets in the middle do not count."""
    made = []
    for sample, size in enumerate(sizes):
        prompt = rng.integers(0, vocabulary, rng.integers(1, 9))
        for _ in range(size):
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, rng.integers(2, 32))])
            counts = (rng.random(len(ids)) < 0.8).astype(np.uint8)
            counts[:len(prompt)], counts[-1] = 0, 1
            values = rng.normal(size=len(ids)).astype(np.float32) if kind == shards.ADVANTAGES else None
            reward = float(np.float32(rng.normal())) if kind == shards.GROUPS else 0.0
            made.append(Document(ids, counts, len(prompt), reward, values, sample=sample))
    return made


# ---- models ----------------------------------------------------------------------------------------------------------------
def score(model, documents, temperature=1.0, **known):
    """Documents with their values under a model, and those of the reference or the old policy where they are known."""
    found = []
    for i, d in enumerate(documents):
        ids = torch.tensor(d.ids.astype(np.int64))
        logp = torch.log_softmax(model(input_ids=ids[None, :-1], use_cache=False).logits[0] / temperature, -1)
        found.append(replace(d, logp=logp.gather(1, ids[1:, None])[:, 0], **{which: values[i] for which, values in known.items() if values}))
    return found


def trainable(model, of=lambda p: p.detach().clone()):
    return {name.replace(".default", ""): of(p) for name, p in model.named_parameters() if p.requires_grad}


# ---- objectives: from scored documents to the loss; metrics are held against TRL's --------------------------------------------
def of_pairs(loss_of):
    """loss_of(chosen, rejected)"""
    return lambda documents: sum(loss_of(*pair) for pair in zip(documents[::2], documents[1::2])) / (len(documents) // 2)


def dpo(beta):
    return of_pairs(lambda c, r: -F.logsigmoid(beta * (c.sum(c.logp - c.reference) - r.sum(r.logp - r.reference))))


def simpo(beta, gamma):
    return of_pairs(lambda c, r: -F.logsigmoid(beta * c.mean(c.logp) - beta * r.mean(r.logp) - gamma))


def orpo(weight):
    log_odds = lambda d: d.mean(d.logp) - torch.log1p(-d.mean(d.logp).exp())
    return of_pairs(lambda c, r: -c.mean(c.logp) - weight * F.logsigmoid(log_odds(c) - log_odds(r)))


def advantage_of(d, documents):
    """[tokens - 1]: its own where it has some, else from the rewards of its group."""
    if d.values is not None:
        return torch.tensor(d.values[1:], dtype=F64)
    rewards = torch.tensor([e.reward for e in documents if e.sample == d.sample], dtype=F64)
    return (d.reward - rewards.mean()) / (rewards.std() + 1e-4) * torch.ones_like(d.m)


def policy(beta=0.0, low=0.2, high=0.2, sequence=False, by_token=False):
    def formula(documents):
        loss = 0
        for d in documents:
            A = advantage_of(d, documents)
            over = d.logp - (d.logp.detach() if d.old is None else d.old)
            r = (d.mean(over).exp() if sequence else over.exp()) * torch.ones_like(over)
            each = -torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)
            if d.reference is not None:
                each = each + beta * ((d.reference - d.logp).exp() - (d.reference - d.logp) - 1) * r
            loss += d.sum(each) / sum(e.m.sum() for e in documents) if by_token else d.mean(each) / len(documents)
        return loss
    return formula


@dataclass
class Case:
    data: str        # pairs, groups, tokens: which of the shards
    objective: str   # the options, in one text
    formula: object
    files: str = ""  # log-probabilities that are given: reference, old
    temperature: float = 1.0


CASES = [
    Case("pairs", "dpo", dpo(0.1), "reference"),
    Case("pairs", "simpo --beta 2.5 --gamma 0.3", simpo(2.5, 0.3)),
    Case("pairs", "orpo --beta 0.7", orpo(0.7)),
    Case("groups", "grpo --beta 0.05", policy(0.05), "reference old", 0.7),
    Case("groups", "gspo --clip-low 0.02 --clip-high 0.03 --beta 0.02", policy(0.02, 0.02, 0.03, True), "reference old"),
    Case("tokens", "ppo --beta 0.2 --normalisation bnpo", policy(0.2, by_token=True), "reference old", 0.8),
]


class Bench:
    """A model, maybe with adapters to train, data for each kind of objective, and what two other models say of these."""

    def __init__(self, name, seed, seq_len, adapters):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.name, self.folder, self.seq_len = f"{name}-{seq_len}", f"test/golden/{name}", seq_len
        self.folders = {"reference": self.variant("reference", 0.7), "old": self.variant("old", 0.05)}
        self.adapter = self.make_adapter() if adapters else None
        self.weights = ["--model", self.folder, *(["--adapter", self.adapter] if adapters else [])]
        self.model = self.policy()
        self.vocabulary = self.model.config.vocab_size
        self.shard, self.all, self.documents = {}, {}, {}
        for data, kind, sizes in (("pairs", shards.PAIRS, [2] * 5), ("groups", shards.GROUPS, [2, 3, 4, 3]),
                                  ("tokens", shards.ADVANTAGES, [1] * 6), ("texts", shards.DOCUMENTS, [1] * 6)):
            made = documents_of(rng, self.vocabulary, kind, sizes)
            self.shard[data] = write_shard(f"{self.name}-{data}", kind, self.vocabulary, made, sizes)
            cut = slice(seq_len + 1)
            made = [replace(d, ids=d.ids[cut], counts=d.counts[cut], values=d.values[cut] if data == "tokens" else None) for d in made]
            left_out = {d.sample for d in made if not d.counts.any()}  # pairs and groups that are cut before all that counts
            self.all[data], self.documents[data] = made, [d for d in made if d.sample not in left_out]
            check(f"{self.name}: some {data} are left out", bool(left_out) == (seq_len < 40) or data in ("tokens", "texts"))
            check(f"{self.name}: others are not", len(self.documents[data]) > 2)

    def save(self, what, model):
        model.save_pretrained(f"{WORK}/{self.name}-{what}")
        return f"{WORK}/{self.name}-{what}"

    def variant(self, what, noise):
        """A model like it with other weights."""
        model = load_model(self.folder, torch.float32, "sdpa")
        for p in model.parameters():
            p.data += noise * p.data.abs().mean() * torch.randn_like(p)
        return self.save(what, model)

    def make_adapter(self):
        """By PEFT, with B that is not zero."""
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32), LoraConfig(
            task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules="all-linear", fan_in_fan_out=self.name.startswith("gpt2")))
        for key, value in model.named_parameters():
            value.data = 0.1 * torch.randn_like(value) if "lora_" in key else value.data
        return self.save("adapter", model)

    def policy(self):
        """To train: the model, or its adapters."""
        if not self.adapter:
            return load_model(self.folder, F64, "sdpa")
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        return PeftModel.from_pretrained(model, self.adapter, is_trainable=True).to(F64).eval()

    @functools.cache
    def logprobs(self, which, data, temperature):
        """(file, values by document): `which` model's, written by the program and computed by torch, which must agree."""
        path = f"{WORK}/{self.name}-{which}-{data}-{temperature}.logprobs"
        train("logprobs", "--model", self.folders[which], "--data", self.shard[data], "--seq-len", self.seq_len,
              "--long", "truncate", "--temperature", temperature, "--out", path, "--quiet")
        with torch.no_grad():
            scored = score(load_model(self.folders[which], F64, "sdpa"), self.all[data], temperature)
        ours = torch.tensor(np.fromfile(path, "<f4", offset=256), dtype=F64)
        theirs, begin = torch.zeros_like(ours), 0
        for d, tokens in zip(scored, shards.Shard(self.shard[data]).table["tokens"].tolist()):
            theirs[begin + 1:begin + 1 + len(d.m)] = d.logp * d.m
            begin += tokens
        check(f"{path}: log-probabilities", len(ours) == begin and float((ours - theirs).abs().max()) <= 2e-5, f"{len(ours)} of {begin}")
        return path, [d.logp for d in scored if d.sample in {e.sample for e in self.documents[data]}]

    def options(self, case, batch=12):
        found = [*self.weights, "--data", self.shard[case.data], "--seq-len", self.seq_len, "--long", "truncate", "--batch", batch,
                 "--objective", *case.objective.split(), "--temperature", case.temperature]
        for which in case.files.split():
            found += [f"--{which}-logprobs", self.logprobs(which, case.data, case.temperature)[0]]
        return found + ["--any-reference"] * bool(case.files)

    def objective(self, case):
        """One pass of bp, and eval of sequences of few pairs or groups, against autograd."""
        what, out, documents = f"{self.name}, {case.objective}", f"{WORK}/g.safetensors", self.documents[case.data]
        known = {which: self.logprobs(which, case.data, case.temperature)[1] for which in case.files.split()}
        loss = case.formula(score(self.model, documents, case.temperature, **known))
        self.model.zero_grad()
        loss.backward()
        found = train("bp", *self.options(case), *CHUNKS, "--json", "--quiet", "--grads-out", out, "--overwrite")
        losses_agree(what, json.loads(found or "{}"), loss)
        near_tensors(f"{what}: gradients", load_file(out), trainable(self.model, lambda p: p.grad), GRADIENT)
        found = train("eval", *self.options(case, batch=1), *CHUNKS, "--json", "--quiet")
        losses_agree(f"{what}, eval", json.loads(found or "{}"), loss)

    def distill(self, k, share, T, ids=None, reverse=False):
        """The divergence from the k likeliest tokens of a teacher, of ids below `ids`, by way of a file: bp and eval against autograd."""
        what, out = f"{self.name}, distill {k} {share} {T} {ids} {reverse}", f"{WORK}/g.safetensors"
        path, V = f"{WORK}/{self.name}-{k}-{T}-{ids}.teacher", ids or self.vocabulary
        read = ["--data", self.shard["texts"], "--seq-len", self.seq_len, "--long", "truncate", "--temperature", T]
        train("logprobs", "--model", self.folders["old"], *read, "--top-k", min(k, V), *(["--vocabulary", ids] if ids else []),
              "--out", path, "--overwrite", "--quiet")
        teacher, loss, surrogate, count = load_model(self.folders["old"], F64, "sdpa"), 0, 0, 0
        for d in self.documents["texts"]:
            tokens = torch.tensor(d.ids.astype(np.int64))
            logits = lambda model: model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
            with torch.no_grad():
                log_p = torch.log_softmax(logits(teacher)[:, :V] / T, -1)
            z, target = logits(self.model), tokens[1:, None]
            logp, log_q = (torch.log_softmax(z / t, -1) for t in (1.0, T))
            top, at = log_p.topk(min(k, V))
            rest = 1 - top.exp().sum(-1)
            left = torch.ones_like(log_q).scatter(-1, at, 0.0)
            apart = (top.exp() * (top - log_q.gather(-1, at))).sum(-1)
            if k < V:
                apart = apart + rest * (rest.log() - (log_q.exp() * left).sum(-1).log())
            if reverse:
                over = log_p.gather(1, target)[:, 0] - log_q.gather(1, target)[:, 0]
                loss, surrogate = loss - d.sum(over.detach()), surrogate - d.sum(over.detach() * log_q.gather(1, target)[:, 0])
            else:
                each = (1 - share) * -logp.gather(1, target)[:, 0] + share * T * T * apart
                loss, surrogate = loss + d.sum(each), surrogate + d.sum(each)
            count = count + d.m.sum()
        self.model.zero_grad()
        (surrogate / count).backward()
        options = [*self.weights, *read, "--objective", "distill", "--teacher-logprobs", path, *CHUNKS, "--json", "--quiet",
                   *(["--distill-loss", "reverse"] if reverse else ["--distill-weight", share])]
        found = train("bp", *options, "--batch", 12, "--grads-out", out, "--overwrite")
        losses_agree(what, json.loads(found or "{}"), loss / count)
        near_tensors(f"{what}: gradients", load_file(out), trainable(self.model, lambda p: p.grad), GRADIENT)
        losses_agree(f"{what}, eval", json.loads(train("eval", *options, "--batch", 1) or "{}"), loss / count)


# ---- training ----------------------------------------------------------------------------------------------------------------
def follow(what, run, steps, model, formula_of):
    """The steps of a run's log, taken by torch's AdamW, with matrices that decay: the loss of each, and at the end the weights."""
    parameters, start = [p for p in model.parameters() if p.requires_grad], trainable(model)
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if (p.dim() > 1) == decays], "weight_decay": DECAY * decays}
                                   for decays in (True, False)], lr=LR, betas=(0.9, 0.95), eps=EPSILON)
    with open(f"{run}/log.jsonl") as log:
        lines = [line for line in map(json.loads, log) if "step" in line and "loss" in line]
    check(f"{what}: a line of log for each step", [line["step"] for line in lines] == [*range(1, steps + 1)])
    for line in lines:
        loss = formula_of(line["step"])
        losses_agree(f"{what}, step {line['step']}", line, loss)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    if isinstance(model, PeftModel):
        ours = load_file(f"{run}/checkpoint-{steps:08d}/adapter_model.safetensors")
    else:
        train("convert", "--model", run, "--out", f"{run}-hf", "--quiet")
        ours = load_file(f"{run}-hf/model.safetensors")
    near_tensors(f"{what}: steps", *({n: t[n].to(F64) - start[n] for n in t} for t in (ours, trainable(model))), 2e-3)


# ---- rollouts ------------------------------------------------------------------------------------------------------------------
RECORDER = """import json, sys
with open(sys.argv[1], "w") as record:
    for line in iter(sys.stdin.readline, ""):
        print(line.strip(), file=record, flush=True)
        print(sum(json.loads(line)["completion_ids"]) % 7, flush=True)
"""


def rollouts(bench, rng):
    """Two steps on the completions of each of two rollouts, whose old policy is the one that wrote them. Of 2 prompts at a time there are
    3 completions each, of which not all fit into one stream."""
    what, temperature = f"{bench.name}, rollouts", 1.3
    run, record, recorder = (f"{WORK}/{bench.name}-{name}" for name in ("rollout", "record", "recorder.py"))
    prompts = [Document(rng.integers(0, bench.vocabulary, n), np.zeros(n, np.uint8), n, sample=i) for i, n in enumerate((6, 1, 11, 3))]
    with open(recorder, "w") as file:
        file.write(RECORDER)
    train("train", *bench.weights, "--objective", "grpo", "--rollout", "--batch", 2, "--group-size", 3, "--seq-len", 24,
          "--data", write_shard(f"{bench.name}-prompts", shards.PROMPTS, bench.vocabulary, prompts, [1] * 4), "--max-new-tokens", 12,
          "--temperature", temperature, "--stop-ids", "5,17,33", *STEPS, "--steps", 4, "--updates", 2, "--quiet",
          "--out", run, "--reward-command", f"{sys.executable} {recorder} {record}")
    with open(record) as file:
        lines = [json.loads(line) for line in file]
    check(f"{what}: three completions of each prompt", sorted((line["prompt_number"], line["prompt_ids"]) for line in lines) ==
          sorted((p.sample, p.ids.tolist()) for p in prompts * 3))
    check(f"{what}: what ended, ended so", all(line["ended"] == (line["completion_ids"][-1] in (5, 17, 33)) for line in lines))
    documents = []
    for i, line in enumerate(lines):
        prompt, ids = len(line["prompt_ids"]), np.array(line["prompt_ids"] + line["completion_ids"])
        documents.append(Document(ids, np.arange(len(ids)) >= prompt, prompt, float(sum(line["completion_ids"]) % 7), sample=i // 3))
    model, old = bench.policy(), {}

    def formula_of(step):
        written = documents[:6] if step <= 2 else documents[6:]
        scored = score(model, written, temperature)
        for i, d in enumerate(scored):
            d.old = old.setdefault((step <= 2, i), d.logp.detach())
        return policy()(scored)
    follow(what, run, 4, model, formula_of)


with rmsnorm_in_the_models_dtype():
    for number, arguments in enumerate(MODELS):
        bench = Bench(arguments[0], 100 + number, *arguments[1:])
        for case in CASES:
            bench.objective(case)
        for case in ((5, 1.0, 1.0), (999, 0.6, 1.7), (8, 0.3, 0.8, bench.vocabulary - 7), (8, 1.0, 1.3, None, True)):
            bench.distill(*case)
        rollouts(bench, np.random.default_rng(200 + number))
close()
