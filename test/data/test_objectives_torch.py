"""Objectives end to end against PyTorch's autograd: losses, gradients and metrics of `bp` and `eval`, the values of `logprobs`,
AdamW's steps in `train`, and what rollouts write. The formulas are here once more, in float64 and of whole documents, which go
through transformers' models one at a time. test_objectives_torch.py TRAIN WORK: the program, an empty folder.
"""
import contextlib
import json
import os
import sys
from dataclasses import dataclass, replace

from checks import TRAIN, WORK, check, close, train

sys.path[1:1] = ["test/golden", "data"]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import shards  # noqa: E402
from make_golden import load_model, rmsnorm_in_the_models_dtype  # noqa: E402

F64 = torch.float64
T = 40  # --seq-len: of no document is more made
LOSS, GRADIENT, METRIC = 1e-5, 2e-5, 1e-5  # relative errors allowed in fp32; of a gradient the L2 norm
CHUNKS = ((1, 1), (7, 5), (10**6, 10**6))  # --chunk, --logits-chunk
MODELS = ("llama", "qwen3", "gpt2", "gemma3")


def near(what, ours, theirs, tolerance=METRIC, rounding=0.0):
    theirs = float(theirs)
    check(what, ours is not None and abs(ours - theirs) <= tolerance * abs(theirs) + max(1e-6, float(rounding)), f"{ours}, not {theirs}")


def near_tensors(what, ours, theirs, tolerance):
    """Every tensor, by name, within a relative L2 error; one that is next to nothing beside the others need not be more exact."""
    check(f"{what}: names", ours.keys() == theirs.keys(), str(sorted(ours.keys() ^ theirs.keys())[:4]))
    floor = 1e-7 * sum(float(t.norm()) ** 2 for t in theirs.values()) ** 0.5
    for name in ours.keys() & theirs.keys():
        error, norm = float((ours[name].to(F64) - theirs[name]).norm()), float(theirs[name].norm())
        if not error <= tolerance * norm + floor:
            check(f"{what}: {name}", False, f"relative error {error / max(norm, 1e-300):.1e}, norm {norm:.1e}")
            return
    check(what, True)


# ---- data ------------------------------------------------------------------------------------------------------------------
@dataclass
class Document:
    ids: np.ndarray     # [tokens]
    counts: np.ndarray  # [tokens] 1: a target that counts
    prompt: int         # tokens
    sample: int         # which pair or group it is in
    reward: float = 0.0
    advantages: np.ndarray = None  # [tokens]


def documents_of(rng, vocabulary, sizes):
    """sizes[i] documents of sample i: one prompt, answers of unequal lengths, of which some targets in the middle do not count."""
    made = []
    for sample, size in enumerate(sizes):
        prompt = rng.integers(0, vocabulary, rng.integers(1, 9))
        for _ in range(size):
            ids = np.concatenate([prompt, rng.integers(0, vocabulary, rng.integers(2, T - 8))])
            counts = (rng.random(len(ids)) < 0.8).astype(np.uint8)
            counts[:len(prompt)], counts[-1] = 0, 1
            made.append(Document(ids, counts, len(prompt), sample, float(np.float32(rng.normal())), rng.normal(size=len(ids))))
    return made


def cut(documents, positions):
    """Documents after --long truncate: maybe without a target that counts."""
    return [replace(d, ids=d.ids[:positions + 1], counts=d.counts[:positions + 1], advantages=d.advantages[:positions + 1])
            for d in documents]


def that_count(documents):
    """Without the pairs and groups of which a document has no target that counts."""
    without = {d.sample for d in documents if not d.counts.any()}
    return [d for d in documents if d.sample not in without]


def write_shard(stem, kind, vocabulary, documents):
    writer = shards.ShardWriter(WORK, stem, kind, vocabulary, 0, "random", 10**9)
    table = np.zeros(len(documents), shards.TABLE)
    ids = [d.ids.astype("<u2") for d in documents]
    counts = [d.counts for d in documents]
    values = [d.advantages.astype(shards.VALUES) for d in documents] if kind == shards.ADVANTAGES else None
    begin = 0
    for i, d in enumerate(documents):
        crc = shards.document_crc(ids[i].tobytes(), counts[i].tobytes(), values[i].tobytes() if values else b"")
        reward = d.reward if kind == shards.GROUPS else 0
        table[i] = (begin, len(d.ids), d.counts.sum(), 0, d.prompt, reward, crc)
        begin += len(d.ids)
    of_sample = [sum(d.sample == s for d in documents) for s in range(documents[-1].sample + 1)]
    writer.add(np.concatenate(ids), np.concatenate(counts), table, of_sample, np.concatenate(values) if values else None)
    path = writer.path()
    writer.close()
    os.rename(path + ".tmp", path)
    writer.forget_old()
    shards.Shard(path).verify()
    return path


# ---- models ----------------------------------------------------------------------------------------------------------------
@dataclass
class Scored:
    """A document under a model, by target: all [tokens - 1], in float64."""
    logp: torch.Tensor
    entropy: torch.Tensor
    m: torch.Tensor  # 1: counts
    document: Document
    reference: torch.Tensor = None
    old: torch.Tensor = None

    def sum(self, x):
        return (self.m * x).sum()

    def mean(self, x):
        return self.sum(x) / self.m.sum()


def score(model, documents, temperature=1.0):
    found = []
    for d in documents:
        ids = torch.tensor(d.ids.astype(np.int64))
        logp = torch.log_softmax(model(input_ids=ids[None, :-1], use_cache=False).logits[0] / temperature, -1)
        m = torch.tensor(d.counts[1:], dtype=F64)
        found.append(Scored(logp.gather(1, ids[1:, None])[:, 0], -(logp.exp() * logp).sum(-1).detach(), m, d))
    return found


def policy_of(bench, adapter=None):
    """To train: the model, or its adapters."""
    if not adapter:
        return load_model(bench.folder, F64, "sdpa")
    model = AutoModelForCausalLM.from_pretrained(bench.folder, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter, is_trainable=True).to(F64).eval()


def reference_of(model, documents, temperature=1.0):
    """Before the first step: of a model with adapters, the one without them."""
    with torch.no_grad(), model.disable_adapter() if isinstance(model, PeftModel) else contextlib.nullcontext():
        return [d.logp for d in score(model, documents, temperature)]


def known(scored, **values):
    """Documents with the reference's or the old policy's log-probabilities."""
    for which, of_documents in values.items():
        for d, value in zip(scored, of_documents or ()):
            setattr(d, which, value)
    return scored


# ---- objectives: from scored documents to the loss and its metrics -----------------------------------------------------------
def of_pairs(loss_of, reward, logps, rounding=lambda d: 0.0):
    """loss_of(chosen, rejected), reward(document), logps(document). rounding(document): of its reward, where that is a difference of
    log-probabilities in fp32, each of which is known to half an ulp; relative to the difference this has no bound."""
    def formula(documents):
        chosen, rejected = documents[::2], documents[1::2]
        mean = lambda of, *lists: sum(of(*each) for each in zip(*lists)) / len(chosen)
        error = [mean(rounding, each) for each in (chosen, rejected)]
        return mean(loss_of, chosen, rejected), {
            "rewards/chosen": (mean(reward, chosen), error[0]), "rewards/rejected": (mean(reward, rejected), error[1]),
            "rewards/margins": (mean(lambda c, r: reward(c) - reward(r), chosen, rejected), sum(error)),
            "rewards/accuracies": mean(lambda c, r: float(reward(c) > reward(r)), chosen, rejected),
            "logps/chosen": mean(logps, chosen), "logps/rejected": mean(logps, rejected)}
    return formula


def dpo(loss="sigmoid", beta=0.1, smoothing=0.0):
    def loss_of(c, r):
        total = Scored.mean if loss == "ipo" else Scored.sum
        h = total(c, c.logp - c.reference) - total(r, r.logp - r.reference)
        if loss == "ipo":
            return (h - 1 / (2 * beta)) ** 2
        if loss == "hinge":
            return F.relu(1 - beta * h)
        return -(1 - smoothing) * F.logsigmoid(beta * h) - smoothing * F.logsigmoid(-beta * h)
    return of_pairs(loss_of, lambda d: beta * d.sum(d.logp - d.reference), lambda d: d.sum(d.logp),
                    lambda d: beta * 2.0**-24 * d.sum(abs(d.logp) + abs(d.reference)))


def simpo(beta=2.0, gamma=1.0):
    return of_pairs(lambda c, r: -F.logsigmoid(beta * c.mean(c.logp) - beta * r.mean(r.logp) - gamma),
                    lambda d: beta * d.mean(d.logp), lambda d: d.mean(d.logp))


def orpo(weight=0.1):
    odds = lambda d: d.mean(d.logp).exp() / (1 - d.mean(d.logp).exp())
    return of_pairs(lambda c, r: -c.mean(c.logp) - weight * F.logsigmoid(torch.log(odds(c) / odds(r))),
                    lambda d: weight * d.mean(d.logp), lambda d: d.mean(d.logp))


def advantages_of(documents, scale):
    """[tokens - 1] for each: its own where it has some, else from the rewards of its group."""
    found = []
    for d in documents:
        rewards = torch.tensor([e.document.reward for e in documents if e.document.sample == d.document.sample], dtype=F64)
        A = d.document.reward - rewards.mean()
        found.append((A / (rewards.std() + 1e-4) if scale else A) * torch.ones_like(d.m))
    return found


def policy(normalisation="grpo", beta=0.0, low=0.2, high=0.2, sequence=False, most=0, scale=True, per_token=False):
    def formula(documents):
        tokens = sum(d.m.sum() for d in documents)
        totals = dict.fromkeys(("kl", "ratio", "clip_low", "clip_high", "entropy"), 0.0)
        loss = 0
        advantages = ([torch.tensor(d.document.advantages[1:]) for d in documents] if per_token else
                      advantages_of(documents, scale))
        for d, A in zip(documents, advantages):
            over = d.logp - (d.logp.detach() if d.old is None else d.old)
            r = (d.mean(over).exp() if sequence else over.exp()) * torch.ones_like(over)
            each = -torch.minimum(r * A, r.clamp(1 - low, 1 + high) * A)
            if d.reference is not None:
                k3 = (d.reference - d.logp).exp() - (d.reference - d.logp) - 1
                each = each + beta * k3
                totals["kl"] += d.sum(k3)
            totals["ratio"] += d.sum(r)
            totals["entropy"] += d.sum(d.entropy)
            totals["clip_low"] += d.sum(((r < 1 - low) & (A < 0)).to(F64))
            totals["clip_high"] += d.sum(((r > 1 + high) & (A > 0)).to(F64))
            loss += {"grpo": d.mean(each) / len(documents), "dr_grpo": d.sum(each) / (len(documents) * max(most, 1)),
                     "bnpo": d.sum(each) / tokens, "dapo": d.sum(each) / tokens}[normalisation]
        metrics = {key: total / tokens for key, total in totals.items() if key != "kl" or documents[0].reference is not None}
        metrics["clip_fraction"] = metrics["clip_low"] + metrics["clip_high"]
        metrics["completion_length"] = tokens / len(documents)
        if not per_token:
            metrics["reward"] = sum(d.document.reward for d in documents) / len(documents)
        return loss, metrics
    return formula


@dataclass
class Case:
    data: str        # pairs, groups, tokens: which of the shards
    objective: str   # the options, in one text
    formula: object
    files: str = ""  # reference, old
    temperature: float = 1.0
    of_itself: bool = False


DPO = Case("pairs", "dpo", dpo(), "reference")
GRPO = Case("groups", "grpo --beta 0.05", policy(beta=0.05), "reference old", 0.7)
GSPO = Case("groups", "gspo --clip-low 0.02 --clip-high 0.03 --beta 0.02", policy(beta=0.02, low=0.02, high=0.03, sequence=True),
            "reference old")
DPO_OF_ITSELF = Case("pairs", "dpo", dpo(), of_itself=True)
GRPO_OF_ITSELF = Case("groups", "grpo --beta 0.05", policy(beta=0.05), "old", 0.7, of_itself=True)
CASES = [
    DPO, GRPO, GSPO,
    Case("pairs", "dpo --label-smoothing 0.2 --beta 0.3", dpo(beta=0.3, smoothing=0.2), "reference"),
    Case("pairs", "dpo --dpo-loss ipo --beta 0.4", dpo("ipo", 0.4), "reference"),
    Case("pairs", "dpo --dpo-loss hinge --beta 0.2", dpo("hinge", 0.2), "reference"),
    Case("pairs", "simpo", simpo()),
    Case("pairs", "simpo --beta 2.5 --gamma 0.3", simpo(2.5, 0.3)),
    Case("pairs", "orpo --beta 0.7", orpo(0.7)),
    Case("groups", "grpo", policy()),
    Case("groups", "grpo --normalisation bnpo --beta 0.1 --clip-low 0.1", policy("bnpo", 0.1, 0.1, 0.1), "reference old"),
    Case("groups", "grpo --normalisation dapo", policy("dapo", high=0.28), "old", 1.5),
    Case("groups", "grpo --normalisation dr_grpo --max-new-tokens 50", policy("dr_grpo", most=50, scale=False), "old"),
    Case("groups", "grpo --scale-rewards none --clip-high 0.1", policy(high=0.1, scale=False), "old"),
    Case("groups", "gspo --normalisation dapo", policy("dapo", low=3e-4, high=4e-4, sequence=True), "old"),
    Case("tokens", "ppo --beta 0.2 --normalisation bnpo", policy("bnpo", 0.2, per_token=True), "reference old", 0.8),
    Case("tokens", "ppo", policy(per_token=True), "old"),
]


class Bench:
    """A model, data for each kind of objective, and what two other models say of these."""

    def __init__(self, name, seed, seq_len=T):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.name, self.folder, self.seq_len = f"{name}-{seq_len}", f"test/golden/{name}", seq_len
        self.model = load_model(self.folder, F64, "sdpa")
        self.vocabulary = self.model.config.vocab_size
        self.folders = {"reference": self.variant("reference", 0.7), "old": self.variant("old", 0.05)}
        self.shard, self.all, self.documents = {}, {}, {}
        for data, kind, sizes in (("pairs", shards.PAIRS, [2] * 5), ("groups", shards.GROUPS, [2, 3, 4, 3]),
                                  ("tokens", shards.ADVANTAGES, [1] * 6)):
            documents = documents_of(rng, self.vocabulary, sizes)
            self.shard[data] = write_shard(f"{self.name}-{data}", kind, self.vocabulary, documents)
            self.all[data] = cut(documents, seq_len)
            self.documents[data] = that_count(self.all[data])
        self.written, self.adapter = {}, self.make_adapter()

    def variant(self, what, noise):
        """A model like it with other weights."""
        model = load_model(self.folder, torch.float32, "sdpa")
        for p in model.parameters():
            p.data += noise * p.data.abs().mean() * torch.randn_like(p)
        model.save_pretrained(f"{WORK}/{self.name}-{what}")
        return f"{WORK}/{self.name}-{what}"

    def make_adapter(self):
        """By PEFT, with B that is not zero."""
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32), LoraConfig(
            task_type="CAUSAL_LM", r=3, lora_alpha=5, target_modules="all-linear", fan_in_fan_out=self.name.startswith("gpt2")))
        for key, value in model.named_parameters():
            if "lora_" in key:
                value.data = 0.1 * torch.randn_like(value)
        model.save_pretrained(f"{WORK}/{self.name}-adapter")
        return f"{WORK}/{self.name}-adapter"

    def logprobs(self, which, data, temperature):
        """(file, values by document): `which` model's, written by the program and computed by torch, which must agree."""
        key = (which, data, temperature)
        if key in self.written:
            return self.written[key]
        path = f"{WORK}/{self.name}-{which}-{data}-{temperature}.logprobs"
        train("logprobs", "--model", self.folders[which], "--data", self.shard[data], "--seq-len", self.seq_len,
              "--long", "truncate", "--temperature", temperature, "--out", path, "--quiet")
        with torch.no_grad():
            scored = score(load_model(self.folders[which], F64, "sdpa"), self.all[data], temperature)
        with open(path, "rb") as file:
            ours = torch.frombuffer(bytearray(file.read()[256:]), dtype=torch.float32).to(F64)
        theirs, begin = torch.zeros_like(ours), 0
        for d, tokens in zip(scored, shards.Shard(self.shard[data]).table["tokens"].tolist()):
            theirs[begin + 1:begin + 1 + len(d.m)] = d.logp * d.m
            begin += tokens
        check(f"{self.name}: log-probabilities of {which}, {data}, temperature {temperature}",
              len(ours) == begin and float((ours - theirs).abs().max()) <= 2e-5, f"{len(ours)} of {begin}")
        self.written[key] = path, [d.logp for d in scored if any(d.document is e for e in self.documents[data])]
        return self.written[key]

    def options(self, case, batch=12):
        found = ["--model", self.folder, "--data", self.shard[case.data], "--seq-len", self.seq_len, "--long", "truncate",
                 "--batch", batch, "--objective", *case.objective.split(), "--temperature", case.temperature]
        for which in case.files.split():
            found += [f"--{which}-logprobs", self.logprobs(which, case.data, case.temperature)[0]]
        return found + ["--any-reference"] if case.files else found

    def score(self, case, model=None):
        """Scored documents with what the case's files say of them. Where a reference is wanted that is not among these, it is the
        model itself, without its adapters."""
        model, documents = model or self.model, self.documents[case.data]
        values = {which: self.logprobs(which, case.data, case.temperature)[1] for which in case.files.split()}
        if case.of_itself:
            values["reference"] = reference_of(model, documents, case.temperature)
        return known(score(model, documents, case.temperature), **values)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}


def metrics_agree(what, ours, theirs):
    for key, value in theirs.items():
        value, rounding = value if isinstance(value, tuple) else (value, 0.0)
        near(f"{what}: {key}", ours.get(key), value, rounding=rounding)


# ---- bp and eval -------------------------------------------------------------------------------------------------------------
def passes(what, options, model, scored, formula):
    """One pass of bp for every size of chunk against autograd."""
    loss, metrics = formula(scored)
    expected = gradients(model, loss)
    for chunk, logits_chunk in CHUNKS:
        name, out = f"{what}, chunks of {chunk}", f"{WORK}/g.safetensors"
        found = json.loads(train("bp", *options, "--chunk", chunk, "--logits-chunk", logits_chunk, "--json", "--quiet",
                                 "--grads-out", out) or "{}")
        if found:
            near(f"{name}: loss", found["loss"], loss.detach(), LOSS)
            metrics_agree(name, found, metrics)
            near_tensors(f"{name}: gradients", load_file(out), expected, GRADIENT)


def evaluated(what, options, scored, formula):
    """eval against torch: of sequences of few pairs or groups."""
    found = json.loads(train("eval", *options, "--json", "--quiet"))
    with torch.no_grad():
        loss, metrics = formula(scored)
    near(f"{what}, eval: loss", found["loss"], loss, LOSS)
    metrics_agree(f"{what}, eval", found, metrics)


# ---- references of their own, and LoRA ---------------------------------------------------------------------------------------
def of_itself(bench):
    """Objectives whose reference the program finds by itself: the model, of one with adapters the one without."""
    for case in (DPO_OF_ITSELF, GRPO_OF_ITSELF):
        for adapter in ("", bench.adapter):
            options = ["--adapter", adapter] * bool(adapter)
            what, model = f"{bench.name} {adapter}, its own reference, {case.objective}", policy_of(bench, adapter)
            passes(what, bench.options(case) + options, model, bench.score(case, model), case.formula)
            if adapter:
                evaluated(what, bench.options(case, 1) + options, bench.score(case, model), case.formula)


# ---- training ----------------------------------------------------------------------------------------------------------------
LR, DECAY, EPSILON = 2e-3, 0.1, 1e-5  # an epsilon above the rounding of a gradient, whose sign alone would count otherwise
STEPS = ["--lr", LR, "--schedule", "constant", "--weight-decay", DECAY, "--epsilon", EPSILON, "--grad-clip", 0.5]


def adamw(model):
    """As the program's options are by default; matrices decay."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
                              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0}],
                             lr=LR, betas=(0.9, 0.95), eps=EPSILON)


def step(model, optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
    optimizer.step()
    return float(loss.detach())


def log_of(run):
    with open(f"{run}/log.jsonl") as log:
        return [line for line in map(json.loads, log) if "step" in line and "loss" in line]


def trainable(model):
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def copies(model):
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def same_weights(what, run, last, model, start):
    """The last checkpoint against the model, whose weights were `start`: also the steps themselves agree."""
    theirs = copies(model)
    if isinstance(model, PeftModel):
        ours = load_file(f"{run}/checkpoint-{last:08d}/adapter_model.safetensors")
    else:
        train("convert", "--model", run, "--out", f"{run}-hf", "--quiet")
        ours = load_file(f"{run}-hf/model.safetensors")
    near_tensors(f"{what}: weights", ours, theirs, 1e-5)
    if ours.keys() == theirs.keys():
        near_tensors(f"{what}: steps", *({n: t[n].to(F64) - start[n] for n in start} for t in (ours, theirs)), 2e-3)


def trained(bench, adapter):
    """Three steps of dpo; its reference is the model as it was."""
    what, run = f"{bench.name}{' with LoRA' * bool(adapter)}, 3 steps of dpo", f"{WORK}/{bench.name}{'-lora' * bool(adapter)}-dpo"
    train("train", *bench.options(DPO_OF_ITSELF), *STEPS, *(["--adapter", adapter] if adapter else []),
          "--steps", 3, "--quiet", "--out", run)
    model, documents = policy_of(bench, adapter), bench.documents["pairs"]
    start, reference, optimizer, losses = copies(model), reference_of(model, documents), adamw(model), []
    for _ in range(3):
        losses.append(step(model, optimizer, DPO.formula(known(score(model, documents), reference=reference))[0]))
    check(f"{what}: a line of log for each", [line["step"] for line in log_of(run)] == [1, 2, 3])
    for line, loss in zip(log_of(run), losses):
        near(f"{what}: loss of step {line['step']}", line["loss"], loss, LOSS)
    check(f"{what}: begins at ln 2", adapter or abs(losses[0] - 0.6931471805599453) < 1e-12)
    check(f"{what}: the loss falls", losses[2] < losses[0] - 1e-3, str(losses))
    same_weights(what, run, 3, model, start)


# ---- rollouts ------------------------------------------------------------------------------------------------------------------
RECORDER = """import json, sys
with open(sys.argv[1], "w") as record:
    for line in iter(sys.stdin.readline, ""):
        reward = sum(json.loads(line)["completion_ids"]) % 7
        print(line.strip(), file=record, flush=True)
        print(reward, flush=True)
"""


def rollout(bench, prompts, name, *options):
    """A run and the lines that its reward command got. Of 2 prompts at a time there are 3 completions each, of which not all fit
    into one stream."""
    run, record, recorder = f"{WORK}/{bench.name}-{name}", f"{WORK}/{bench.name}-{name}.jsonl", f"{WORK}/recorder.py"
    with open(recorder, "w") as file:
        file.write(RECORDER)
    train("train", "--model", bench.folder, "--objective", "grpo", "--rollout", "--data", prompts, "--batch", 2, "--group-size", 3,
          "--seq-len", 24, "--max-new-tokens", 12, *options, "--quiet", "--out", run, "--reward-command",
          f"{sys.executable} {recorder} {record}")
    with open(record) as file:
        return run, [json.loads(line) for line in file]


def trained_rollout(bench, adapter, seed):
    """Two steps on the completions of each of two rollouts: the old policy of the second step is the one that wrote them. With
    adapters there is a divergence from the model without them."""
    what, beta, temperature, rng = f"{bench.name}{' with LoRA' * bool(adapter)}, rollouts", 0.1 if adapter else 0, 1.3, np.random.default_rng(seed)
    prompts = [Document(rng.integers(0, bench.vocabulary, n), np.zeros(n, np.uint8), n, i) for i, n in enumerate((6, 1, 11, 3))]
    run, lines = rollout(bench, write_shard(f"{bench.name}-prompts", shards.PROMPTS, bench.vocabulary, prompts),
                         "rollout-lora" if adapter else "rollout", *STEPS, "--steps", 4, "--updates", 2, "--temperature", temperature,
                         "--stop-ids", "5,17,33", "--beta", beta, *(["--adapter", adapter] if adapter else []))
    check(f"{what}: three completions of each prompt", sorted(line["prompt_number"] for line in lines) == sorted([0, 1, 2, 3] * 3))
    check(f"{what}: its prompts", all(line["prompt_ids"] == prompts[line["prompt_number"]].ids.tolist() for line in lines))
    check(f"{what}: what ended, ended so", all(line["ended"] == (line["completion_ids"][-1] in (5, 17, 33)) for line in lines))
    documents = []
    for i, line in enumerate(lines):
        prompt, ids = len(line["prompt_ids"]), np.array(line["prompt_ids"] + line["completion_ids"])
        documents.append(Document(ids, (np.arange(len(ids)) >= prompt).astype(np.uint8), prompt, i // 3,
                                  float(sum(line["completion_ids"]) % 7)))
    model = policy_of(bench, adapter)
    start, optimizer = copies(model), adamw(model)
    check(f"{what}: a line of log for each step", [line["step"] for line in log_of(run)] == [1, 2, 3, 4])
    for line in log_of(run):
        written = documents[:6] if line["step"] <= 2 else documents[6:]
        scored = score(model, written, temperature)
        if line["step"] % 2:
            old = [d.logp.detach() for d in scored]
        reference = reference_of(model, written, temperature) if beta else None
        loss, metrics = policy(beta=beta)(known(scored, old=old, reference=reference))
        metrics = {key: float(value) for key, value in metrics.items()}
        near(f"{what}: loss of step {line['step']}", line["loss"], step(model, optimizer, loss), LOSS)
        metrics_agree(f"{what}: step {line['step']}", line, metrics)
    same_weights(what, run, 4, model, start)


def objectives(bench, cases):
    for case in cases:
        what, scored = f"{bench.name}, {case.objective}", bench.score(case)
        passes(what, bench.options(case), bench.model, scored, case.formula)
        evaluated(what, bench.options(case, batch=1), scored, case.formula)


with rmsnorm_in_the_models_dtype():
    for number, golden in enumerate(MODELS):
        bench = Bench(golden, 100 + number)
        objectives(bench, CASES if golden == "llama" else CASES[:3])
        of_itself(bench)
        for adapter in (None, bench.adapter):
            trained(bench, adapter)
            trained_rollout(bench, adapter, 200 + number)
    truncated = Bench("llama", 104, seq_len=7)
    for data in ("pairs", "groups", "tokens"):
        check(f"some {data} are left out", 2 < len(truncated.documents[data]) < len(truncated.all[data]),
              f"{len(truncated.documents[data])} of {len(truncated.all[data])}")
    objectives(truncated, CASES)
close()
