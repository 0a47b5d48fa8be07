"""Hugging Face transformers with gradient checkpointing: --loss plain (as the library computes it) or chunked.

The arguments are those of torch_pass.py. Chunked: logits exist for --logits-chunk tokens at a time (2048 unless told),
and each chunk's backward follows its forward at once, so that nothing of the head is computed twice; gradients of
weights are added in place, the gradient of the hidden states is written where it belongs. It is the least memory and
time that PyTorch's own operators take.
"""

import importlib.util
import os
import sys
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import torch_pass  # noqa: E402
import transformers  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

MEASURED_TOKENS = 8192  # longest length at which attention kernels are compared


def load(options, attention):
    config = transformers.AutoConfig.from_pretrained(options.model)
    for key in ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"):  # other contenders have none
        if hasattr(config, key):
            setattr(config, key, 0.0)
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, config=config, torch_dtype=torch_pass.DTYPES[options.dtype], attn_implementation=attention
    )
    model = model.to(options.device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


# ---- attention -----------------------------------------------------------------------------------------------------
def attention_seconds(backend, q, k, v):
    """Returns the time of causal attention's forward and backward by one kernel, the better of two; None if it refuses."""
    times = []
    with sdpa_kernel(backend):
        for _ in range(3):  # the first one warms up
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            try:
                F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(torch.ones_like(q))
            except RuntimeError as error:
                if torch_pass.out_of_memory(error):
                    raise
                return None
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1000)
    return min(times[1:])


class Attention:
    """flash-attn if installed (bf16 on a GPU), else the fastest of PyTorch's kernels at the model's shape."""

    def __init__(self, options):
        self.options = options
        self.on_gpu = options.device == "cuda"
        flash = self.on_gpu and options.dtype == "bf16" and importlib.util.find_spec("flash_attn")
        self.implementation = "flash_attention_2" if flash else "sdpa"
        self.backend = None  # sdpa's, once measured
        self.seconds = {}

    def choose(self, config, T):
        if self.implementation != "sdpa" or not self.on_gpu:
            return
        T = min(T, MEASURED_TOKENS)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (self.options.batch, heads, T, head_dim)
        q, k, v = (
            torch.randn(shape, device="cuda", dtype=torch_pass.DTYPES[self.options.dtype], requires_grad=True)
            for _ in range(3)
        )
        candidates = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        times = {backend: attention_seconds(backend, q, k, v) for backend in candidates}
        self.seconds = {backend: seconds for backend, seconds in times.items() if seconds is not None}
        self.backend = min(self.seconds, key=self.seconds.get) if self.seconds else None

    def chosen(self):
        """Returns a context that prefers the measured kernel, and lets others take calls that it refuses."""
        if self.backend is None:
            return torch.enable_grad()
        others = [
            b
            for b in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
            if b != self.backend
        ]
        return sdpa_kernel([self.backend, *others], set_priority=True)

    def name(self):
        if self.backend is None:
            return self.implementation
        times = ", ".join(f"{b.name.split('_')[0].lower()} {s * 1000:.2f} ms" for b, s in self.seconds.items())
        return f"sdpa ({self.backend.name.split('_')[0].lower()}; of {times})"


# ---- experts -------------------------------------------------------------------------------------------------------
def choose_experts(model, device):
    """Takes the faster of transformers' experts for many rows, by a pass of 1024 tokens. Returns its name; "": no experts."""
    times = {}
    if not model._can_set_experts_implementation():
        return ""
    tokens = torch.zeros((1, 1024), dtype=torch.long, device=device) + torch.arange(1024, device=device)
    for name in ("grouped_mm", "eager"):
        model.set_experts_implementation(name)
        for _ in range(2):  # the first one warms up
            begin = time.perf_counter()
            model(input_ids=tokens % model.config.vocab_size, use_cache=False).logits.sum().backward()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name] = time.perf_counter() - begin
    model.zero_grad(set_to_none=True)
    fastest = min(times, key=times.get)
    model.set_experts_implementation(fastest)
    return fastest


# ---- losses --------------------------------------------------------------------------------------------------------
def plain_pass(model, inputs, targets):
    """transformers' loss; it holds the logits of all tokens, also in fp32."""
    loss = model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
    loss.backward()
    return loss.detach()


def chunked_pass(model, inputs, targets, chunk):
    hidden = model.base_model(input_ids=inputs, use_cache=False)[0].flatten(0, 1)  # [B T, C]
    head, targets = model.get_output_embeddings(), targets.flatten()
    gradient, total = torch.empty_like(hidden), torch.zeros((), device=hidden.device)
    for begin in range(0, len(targets), chunk):
        part = slice(begin, begin + chunk)
        x = hidden[part].detach().requires_grad_()
        loss = F.cross_entropy(head(x).float(), targets[part], reduction="sum") / len(targets)
        loss.backward()
        gradient[part] = x.grad
        total += loss.detach()
    hidden.backward(gradient)
    return total


def prepare(options):
    attention = Attention(options)
    model = load(options, attention.implementation)
    experts = choose_experts(model, options.device)
    chunk = options.logits_chunk or 2048

    def one_pass(inputs, targets):
        with attention.chosen():
            return (
                plain_pass(model, inputs, targets)
                if options.loss == "plain"
                else chunked_pass(model, inputs, targets, chunk)
            )

    return torch_pass.Setup(
        model,
        one_pass,
        before_length=lambda T: attention.choose(model.config, T),
        attention=lambda: attention.name() + (f"; experts {experts}" if experts else ""),
        versions={"transformers": transformers.__version__},
    )


if __name__ == "__main__":
    torch_pass.run("hf-chunked" if "chunked" in sys.argv else "hf", prepare)
