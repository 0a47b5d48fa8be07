"""The StreamBP paper's own PyTorch code (arXiv 2506.03077), from a checkout: --checkout DIR, transformers 4.51.3.

The arguments are those of torch_pass.py. Its StreamModel is run as its scripts run it: gradient checkpointing enabled,
with an attention mask of ones, because without a mask its chunks attend to the wrong keys. One thing is put right, so
that the loss is that of the other contenders: it shifts labels by itself and so has no target for the last position;
LossWithLastTarget gives it one, at no cost.
"""

import importlib.util
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch_pass  # noqa: E402
import transformers  # noqa: E402

NOTE = "mask of ones; the last position, which it leaves out, has its target"


def load_stream_model(checkout):
    """Loads the class from its file: the package would import trainers, and their libraries."""
    path = os.path.join(checkout, "src", "streambp", "stream_model.py")
    spec = importlib.util.spec_from_file_location("stream_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.StreamModel


class LossWithLastTarget:
    """The loss of a chunk in place of transformers' ForCausalLMLoss.

    StreamModel calls it with labels [B, n + 1] of a chunk, a view of all labels [B, T], and multiplies what it returns
    by B n, the targets that it sees there. The last chunk, of n positions, has n with the one that follows, not n - 1.
    """

    def __init__(self):
        self.last = None  # [B, 1] target of the last position
        self.length = 0

    def __call__(self, logits, labels, vocab_size, **_ignored):
        targets = labels[:, 1:]
        multiplier = targets.numel()
        if labels.storage_offset() % self.length + labels.shape[1] == self.length:
            targets = torch.cat((targets, self.last), dim=1)
        logits = logits[:, : targets.shape[1]].float()
        return F.cross_entropy(logits.reshape(-1, vocab_size), targets.reshape(-1), reduction="sum") / multiplier


def prepare(options):
    if not options.checkout:
        raise SystemExit("paper: --checkout DIR: the folder of https://github.com/Ledzy/StreamBP")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, torch_dtype=torch_pass.DTYPES[options.dtype]
    )
    model = model.to(options.device).train()
    loss_function = LossWithLastTarget()
    model.loss_function = loss_function
    stream = load_stream_model(options.checkout)(model, gradient_accumulation_steps=1, stream_checkpoint=True)
    stream.gradient_checkpointing_enable()

    def before_length(T):
        stream.checkpoint_chunk_size = torch_pass.chunk_tokens(
            options.chunk or "T/3", T
        )  # a third: the paper's timings
        stream.logits_chunk_size = options.logits_chunk or 100
        while T % stream.logits_chunk_size == 1:  # a last chunk of one position would be left out
            stream.logits_chunk_size += 1

    def one_pass(inputs, targets):
        loss_function.last, loss_function.length = targets[:, -1:], inputs.shape[1]
        return stream(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            labels=inputs,
            use_cache=False,
            output_attentions=False,
            output_hidden_states=False,
            return_dict=True,
        ).loss

    names = NamesOf(model)
    return torch_pass.Setup(
        names, one_pass, before_length, lambda: "sdpa, dense mask", {"transformers": transformers.__version__}, NOTE
    )


class NamesOf:
    """Returns the model's parameters under their names before StreamModel wrapped its layers."""

    def __init__(self, model):
        self.model = model

    def parameters(self):
        return self.model.parameters()

    def named_parameters(self):
        for name, parameter in self.model.named_parameters():
            yield name.replace(".base_layer.", ".").replace(".self_attn.self_attn.", ".self_attn."), parameter


if __name__ == "__main__":
    torch_pass.run("paper", prepare)
