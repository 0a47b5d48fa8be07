#!/usr/bin/env python3
"""
Makes objectives.json: losses, their gradients by every log-probability, and metrics as TRL's own trainers compute them, in float64, for
one stream of pairs and one of groups. The test reads the committed file; only whoever changes it runs this.

    pip install torch==2.15.0 transformers==5.23.0 accelerate datasets trl==1.16.0
    python make_objectives.py

A trainer is made without a model: what it asks a model for (log-probabilities of targets, entropies) are random numbers, given to it in
the padded shape that it wants and taken from a packed stream, so that autograd's gradient is that by the stream's log-probabilities.
All of them are fp32 numbers, so that they mean the same in any build.

What is not TRL's: orpo's first term, which TRL takes over other tokens (objective.h), is the formula, and TRL's odds ratio, which casts to
fp32, is kept in float64; dpo with label smoothing is what CPOTrainer makes of log-ratios in place of log-probabilities; a group's
advantages are torch's (r - mean) / (std + 1e-4), since TRL computes them in the midst of sampling.
"""
import collections
import json
import pathlib
import types
import unittest.mock

import torch
import transformers
import trl
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer

HERE = pathlib.Path(__file__).resolve().parent
F64 = torch.float64


class Stream:
    """Documents of (prompt, completion) tokens; a completion's targets count but for some `holes` (document, index)."""

    def __init__(self, documents, group, holes, generator):
        self.documents, self.group, self.generator = documents, group, generator
        self.start = [0]
        for prompt, completion in documents:
            self.start.append(self.start[-1] + prompt + completion)
        self.counted = torch.zeros(self.start[-1], dtype=torch.int64)
        for d, (prompt, completion) in enumerate(documents):
            first = self.start[d] + prompt - 1  # the position whose target is the completion's first token
            self.counted[first : first + completion] = 1
            for hole in (h for where, h in holes if where == d):
                self.counted[first + hole] = 0
        self.logp = self.fp32(-self.normal(2.0).abs() - 0.01)
        self.reference = self.fp32(self.logp + self.normal(0.4))
        self.old = self.fp32(self.logp + self.normal(0.25))
        self.entropy = self.fp32(self.normal(1.0).abs())

    def kept(self, masked):
        """The targets that count but for those of `masked` documents."""
        kept = self.counted.clone()
        for d in masked:
            kept[self.start[d] : self.start[d + 1]] = 0
        return kept

    def normal(self, deviation):
        return torch.randn(self.start[-1], dtype=F64, generator=self.generator) * deviation

    @staticmethod
    def fp32(values):
        return values.to(torch.float32).to(F64)

    def padded(self, values, offset, width):
        """[documents, width]: of each document from `offset(d)` on what a stream's values are, then 0."""
        rows = []
        for d in range(len(self.documents)):
            row = values[self.start[d] + offset(d) : self.start[d + 1]][:width]
            rows.append(torch.cat([row, torch.zeros(width - len(row), dtype=row.dtype)]))
        return torch.stack(rows)

    def json(self):
        return {
            "document_start": self.start,
            "group": self.group,
            "counted": self.counted.tolist(),
            "logp": self.logp.tolist(),
            "reference": self.reference.tolist(),
            "old": self.old.tolist(),
            "entropy": self.entropy.tolist(),
        }


class Accelerator:
    """Of one process."""

    num_processes, sync_gradients, device = 1, True, torch.device("cpu")
    gather = gather_for_metrics = staticmethod(lambda x: x)

    @staticmethod
    def reduce(x, reduction):
        return x


class Answers(torch.nn.Module):
    """In place of a model: the log-probabilities it was made with."""

    is_gradient_checkpointing = False

    def __init__(self, log_probs, entropy):
        super().__init__()
        self.answer = types.SimpleNamespace(
            log_probs=log_probs,
            entropy=entropy,
            mean_logits=torch.zeros_like(entropy),
            is_top1=torch.zeros_like(entropy, dtype=torch.bool),
        )

    def forward(self, **_):
        return self.answer


def bare(trainer, **attributes):
    made = trainer.__new__(trainer)
    for name, value in attributes.items():
        setattr(made, name, value)
    made.accelerator = Accelerator()
    made._metrics = {"train": collections.defaultdict(list)}
    made.aux_loss_enabled = False
    return made


def metrics_of(trainer, names):
    return {name: trainer._metrics["train"][name][0] for name in names}


PAIR_METRICS = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"]


def chosen_first(rows):
    """Chosen and rejected alternate in a stream, and are two halves in TRL."""
    return torch.cat([rows[0::2], rows[1::2]])


def dpo(stream, logp, kind, beta, smoothing=0.0):
    width = max(sum(lengths) for lengths in stream.documents)
    mask = chosen_first(stream.padded(stream.counted, lambda d: 0, width - 1))
    log_probs = chosen_first(stream.padded(logp, lambda d: 0, width - 1)) * mask
    reference = chosen_first(stream.padded(stream.reference, lambda d: 0, width - 1)) * mask
    entropy = chosen_first(stream.padded(stream.entropy, lambda d: 0, width - 1))
    trainer = bare(
        trl.DPOTrainer, model=Answers(log_probs, entropy), ref_model=Answers(reference, entropy), beta=beta, loss_types=[kind],
        loss_weights=[1.0], label_smoothing=smoothing, f_divergence_type="reverse_kl", ld_alpha=None, use_weighting=False,
        precompute_ref_logps=False, _tp_size=1, _total_train_tokens=0, args=types.SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    none = torch.zeros(len(mask), 1, dtype=mask.dtype)  # the first token is no target
    ids = torch.zeros(len(mask), width, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": torch.cat([none, mask], dim=1)}
    loss = trainer._compute_loss(trainer.model, inputs, False)
    return loss, metrics_of(trainer, [*PAIR_METRICS, "entropy"])


class KtoAnswers(Answers):
    """The same with the sums of mismatched completions."""

    def __init__(self, log_probs, entropy, mismatched):
        super().__init__(log_probs, entropy)
        self.mismatched = mismatched


def kto(stream, logp, kind, beta, weights, mismatched):
    width = max(sum(lengths) for lengths in stream.documents)
    mask = stream.padded(stream.counted, lambda d: 0, width - 1)
    padded = lambda values: stream.padded(values, lambda d: 0, width - 1)
    trainer = bare(
        trl.KTOTrainer, model=KtoAnswers(padded(logp) * mask, padded(stream.entropy), mismatched[0]),
        ref_model=KtoAnswers(padded(stream.reference) * mask, padded(stream.entropy), mismatched[1]), beta=beta, loss_type=kind,
        desirable_weight=weights[0], undesirable_weight=weights[1], calculate_KL=kind == "kto", precompute_ref_logps=False, _tp_size=1,
        _total_train_tokens=0, args=types.SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    trainer._compute_kl_logps = lambda model, batch: model.mismatched
    none = torch.zeros(len(mask), 1, dtype=mask.dtype)  # the first token is no target
    ids = torch.zeros(len(mask), width, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": torch.cat([none, mask], dim=1),
              "label": LABELS == 1}
    loss = trainer._compute_loss(trainer.model, inputs, False)
    names = ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "entropy", *["kl"] * (kind == "kto")]
    return loss, metrics_of(trainer, {name: name for name in names})


def document_sums(stream, values):
    return torch.stack([(values * stream.counted)[a:b].sum() for a, b in zip(stream.start, stream.start[1:])])


def means(stream, values):
    return document_sums(stream, values) / document_sums(stream, torch.ones_like(values))


def pair_metrics(chosen_reward, rejected_reward, chosen, rejected):
    accuracies = (chosen_reward > rejected_reward).double()
    values = [chosen_reward, rejected_reward, chosen_reward - rejected_reward, accuracies, chosen, rejected]
    return {name: value.mean().item() for name, value in zip(PAIR_METRICS, values)}


def smoothed_dpo(stream, logp, beta, smoothing):
    ratios = document_sums(stream, logp - stream.reference)
    trainer = bare(CPOTrainer, beta=beta, loss_type="sigmoid", label_smoothing=smoothing, alpha=0.0)
    losses, chosen, rejected = trainer.cpo_loss(ratios[0::2], ratios[1::2])
    sums = document_sums(stream, logp)
    return losses.mean(), pair_metrics(chosen, rejected, sums[0::2], sums[1::2])


def simpo(stream, logp, beta, gamma):
    mean = means(stream, logp)
    trainer = bare(CPOTrainer, beta=beta, loss_type="simpo", simpo_gamma=gamma, label_smoothing=0.0, alpha=0.0)
    losses, chosen, rejected = trainer.cpo_loss(mean[0::2], mean[1::2])
    return losses.mean(), pair_metrics(chosen, rejected, mean[0::2], mean[1::2])


def orpo(stream, logp, beta):
    mean = means(stream, logp)
    trainer = bare(ORPOTrainer, beta=beta)
    with unittest.mock.patch.object(torch.Tensor, "float", lambda self: self):
        losses, chosen, rejected, _, _ = trainer.odds_ratio_loss(mean[0::2], mean[1::2])
    return -mean[0::2].mean() - losses.mean(), pair_metrics(chosen, rejected, mean[0::2], mean[1::2])


def grpo(stream, logp, advantage, normalisation, beta, clip_low, clip_high, old, level, completion_tokens, correction=False, masked=()):
    width = max(completion for _, completion in stream.documents)
    prompts = [prompt for prompt, _ in stream.documents]

    def completions(values):
        return stream.padded(values, lambda d: prompts[d] - 1, width)

    inside = torch.stack([(torch.arange(width) < completion).long() for _, completion in stream.documents])
    trainer = bare(
        trl.GRPOTrainer, model=types.SimpleNamespace(training=True), beta=beta, epsilon_low=clip_low, epsilon_high=clip_high,
        loss_type=normalisation, importance_sampling_level=level, top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False,
        _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1, max_completion_length=completion_tokens,
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=correction, steps_per_generation=1),
    )
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (completions(logp), completions(stream.entropy), None)
    ids = torch.zeros_like(inside)
    kept = stream.kept(masked)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]), "completion_ids": ids, "completion_mask": inside,
        "tool_mask": completions(kept), "ref_per_token_logps": completions(stream.reference),
        "advantages": advantage if len(advantage) == len(prompts) else completions(advantage), "num_items_in_batch": kept.sum(),
    }
    if old:
        inputs["old_per_token_logps"] = completions(stream.old)
    loss = trainer._compute_loss(trainer.model, inputs)
    names = ["entropy"]
    if beta:
        names.append("kl")
    if normalisation == "cispo":
        names.append("cispo_clip_ratio")
    elif level == "token" or len(advantage) == len(prompts):  # of gspo TRL counts documents
        names += ["clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"]
    return loss, metrics_of(trainer, names)


def case(stream, about, compute):
    logp = stream.logp.clone().requires_grad_()
    loss, metrics = compute(logp)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.dtype == F64 and gradient[stream.kept(about.get("masked", ())) == 0].abs().sum() == 0
    return {**about, "loss": loss.item(), "weight": gradient.tolist(), "metrics": metrics}


def pair_cases(stream):
    for beta in (0.1, 0.7, 3.0):  # the last: hinge is flat for some pairs
        for kind in ("sigmoid", "ipo", "hinge"):
            about = {"objective": "dpo", "dpo_loss": kind, "beta": beta}
            yield case(stream, about, lambda logp: dpo(stream, logp, kind, beta))
    about = {"objective": "dpo", "dpo_loss": "sigmoid", "beta": 0.3, "label_smoothing": 0.15}
    yield case(stream, about, lambda logp: smoothed_dpo(stream, logp, 0.3, 0.15))
    for beta, smoothing in ((0.3, 0.15), (2.0, 0.45)):
        about = {"objective": "dpo", "dpo_loss": "robust", "beta": beta, "label_smoothing": smoothing}
        yield case(stream, about, lambda logp: dpo(stream, logp, "robust", beta, smoothing))
    for beta, gamma in ((2.0, 1.0), (2.5, 0.0), (10.0, 3.0)):
        about = {"objective": "simpo", "beta": beta, "gamma": gamma}
        yield case(stream, about, lambda logp: simpo(stream, logp, beta, gamma))
    for beta in (0.1, 1.0):
        yield case(stream, {"objective": "orpo", "beta": beta}, lambda logp: orpo(stream, logp, beta))


LABELS = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1])


def label_cases(stream, generator):
    for kind, beta, weights, more in (("kto", 0.1, (1.0, 1.0), 2.0), ("kto", 0.7, (1.0, 1.0), 0.5), ("kto", 0.7, (1.3, 0.8), 1.0),
                                      ("kto", 0.3, (1.0, 1.0), -3.0),  # a divergence of 0
                                      ("apo_zero_unpaired", 0.1, (1.0, 1.0), 2.0), ("apo_zero_unpaired", 0.7, (0.5, 1.0), 2.0)):
        reference = -torch.rand(8, dtype=F64, generator=generator) * 9 - 3
        mismatched = reference + more + torch.randn(8, dtype=F64, generator=generator), reference
        about = {"objective": "kto", "kto_loss": kind.removesuffix("_unpaired"), "beta": beta, "desirable_weight": weights[0],
                 "undesirable_weight": weights[1], "kl": max(0.0, (mismatched[0] - mismatched[1]).mean().item())}
        yield case(stream, about, lambda logp: kto(stream, logp, kind, beta, weights, mismatched))


def group_cases(stream, of_document, of_token):
    tokens = 16  # dr_grpo's completion_tokens
    kinds = [("grpo", of_document, "token", 0.2, 0.2), ("gspo", of_document, "sequence", 3e-4, 4e-4),
             ("gspo", of_document, "sequence", 0.05, 0.1), ("ppo", of_token, "token", 0.1, 0.3), ("gspo", of_token, "sequence", 0.02, 0.03)]
    for name, advantage, level, low, high in kinds:
        for normalisation in ("grpo", "bnpo", "dr_grpo", "dapo"):
            for beta, old in ((0.0, True), (0.04, True), (0.04, False)):
                if name != "grpo" and normalisation in ("bnpo", "dr_grpo") and (beta == 0 or not old):
                    continue  # nothing new
                wide = 0.28 if normalisation == "dapo" and name == "grpo" else high
                about = {"objective": name, "normalisation": normalisation, "beta": beta, "clip_low": low, "clip_high": wide, "old": old,
                         "completion_tokens": tokens, "advantage": "token" if advantage is of_token else "document"}
                yield case(stream, about, lambda logp: grpo(stream, logp, advantage, normalisation, beta, low, wide, old, level, tokens))


def corrected_cases(stream, of_document):
    """The divergence weighted by the ratio, cispo, and completions that were cut off."""
    tokens, cut = 16, [1, 6]
    kinds = [("grpo", "grpo", "token", 0.2, 0.2), ("grpo", "dapo", "token", 0.2, 0.28), ("gspo", "grpo", "sequence", 0.02, 0.03),
             ("gspo", "dapo", "sequence", 0.02, 0.03), ("cispo", "cispo", "token", 0.2, 1.2)]
    for name, normalisation, level, low, high in kinds:
        for beta, old, masked in ((0.04, True, []), (0.3, False, cut), (0.0, True, cut)):
            about = {"objective": name, "normalisation": "bnpo" if name == "cispo" else normalisation, "beta": beta, "clip_low": low,
                     "clip_high": high, "old": old, "completion_tokens": tokens, "advantage": "document", "kl_correction": True,
                     "masked": masked}
            yield case(stream, about, lambda logp: grpo(
                stream, logp, of_document, normalisation, beta, low, high, old, level, tokens, True, masked))
    about = {"objective": "grpo", "normalisation": "dr_grpo", "beta": 0.0, "clip_low": 0.2, "clip_high": 0.2, "old": True,
             "completion_tokens": tokens, "advantage": "document", "masked": cut}
    yield case(stream, about, lambda logp: grpo(stream, logp, of_document, "dr_grpo", 0.0, 0.2, 0.2, True, "token", tokens, False, cut))


def main():
    generator = torch.Generator().manual_seed(20)
    documents = [(3, 4), (3, 7), (1, 1), (2, 5), (5, 6), (5, 2), (2, 3), (2, 3)]
    pairs = Stream(documents, [0, 0, 1, 1, 2, 2, 3, 3], [(1, 2), (4, 0), (4, 3)], generator)
    documents = [(2, 5), (2, 9), (2, 1), (2, 4), (1, 3), (1, 6), (1, 2), (1, 8)]
    groups = Stream(documents, [0, 0, 0, 0, 1, 1, 1, 1], [(1, 3), (1, 4), (5, 0)], generator)
    reward = Stream.fp32(torch.randn(8, dtype=F64, generator=generator))
    grouped = reward.view(2, 4)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    scaled = centred / (grouped.std(dim=1, keepdim=True) + 1e-4)
    lengths = torch.tensor([sum(lengths) for lengths in groups.documents])
    of_document = Stream.fp32(scaled.flatten())
    of_token = Stream.fp32(groups.normal(1.0))
    made = {
        "versions": f"trl {trl.__version__}, torch {torch.__version__}, transformers {transformers.__version__}",
        "pairs": {**pairs.json(), "label": LABELS.tolist()},
        "groups": {
            **groups.json(), "reward": reward.tolist(), "centred": centred.flatten().tolist(), "scaled": scaled.flatten().tolist(),
            "document_advantage": of_document.repeat_interleave(lengths).tolist(), "token_advantage": of_token.tolist(),
        },
    }
    lines = [f'"{key}": {json.dumps(value)}' for key, value in made.items()]
    for key, cases in (("pair_cases", pair_cases(pairs)), ("label_cases", label_cases(pairs, generator)),
                       ("group_cases", group_cases(groups, of_document, of_token)),
                       ("corrected_cases", corrected_cases(groups, of_document))):
        lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(c) for c in cases) + "\n]")
    (HERE / "objectives.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


main()
