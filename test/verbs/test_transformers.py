"""Folders that `train convert` writes, as transformers reads them: from_pretrained loads them, nothing missing and nothing over,
with the logits, to the bit, of the model that was converted. And hybrid models (hybrid_trials.py). test_transformers.py TRAIN WORK:
the program, an empty folder.
"""
import json
import os
import shutil
import subprocess

from checks import GOLDEN, TRAIN, WORK, check, close, train
from family_trials import family_trials
from hybrid_trials import trials

import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config, Gemma4Config,
                          Gemma4UnifiedConfig, Mistral3Config,
                          Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5MoeConfig)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.utils import logging

logging.disable_progress_bar()

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Keys that a config.json written anew may say otherwise: how the model was trained and saved, and special tokens, which
# weights know nothing of.
FREE = {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout",
        "n_inner", "torch_dtype", "rope_theta", "partial_rotary_factor", "max_window_layers", "_name_or_path", "pretraining_tp",
        "sliding_window_pattern", "_sliding_window_pattern",  # layer_types says it layer by layer
        "chunk_size", "mamba_chunk_size"}  # in what order Mamba-2's scan adds
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # where nothing is said


def convert(*arguments):
    train("convert", "--quiet", *arguments)


def load(folder, dtype=None):
    """The model in `dtype`, or in the type that from_pretrained gives it unasked, and what was wrong with its tensors."""
    auto = AutoModelForImageTextToText if AutoConfig.from_pretrained(folder).model_type == "mistral4" else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True, experts_implementation="eager",
                                                       **({"dtype": dtype} if dtype else {}))
    wrong = {kind: keys for kind, keys in info.items() if keys and kind != "error_msgs"}
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # a file's tensors are not aligned, which changes the last bits of products
    return model.eval(), wrong or info.get("error_msgs")


def logits(model):
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (2, 33), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return model(ids, use_cache=False).logits  # a cache of linear layers alone is none in transformers 5.23


def compare(what, original, folder, dtype=None):
    """The folder, loaded unasked, must be the original in `dtype`: its logits, its type, and the same tensors."""
    expected, _ = load(original, dtype)
    found, wrong = load(folder)
    check(f"{what}: tensors", not wrong, str(wrong))
    check(f"{what}: type", found.dtype == expected.dtype, f"{found.dtype}, not {expected.dtype}")
    for ours, theirs in zip(found.modules(), expected.modules()):
        ours.chunk_size = getattr(theirs, "chunk_size", None)
    check(f"{what}: logits", torch.equal(logits(expected), logits(found)))
    ours, theirs = found.state_dict(), expected.state_dict()
    check(f"{what}: weights", ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours))


def compare_configs(what, original, folder):
    a, b = (AutoConfig.from_pretrained(f).to_dict() for f in (original, folder))
    for c in (a, b):  # Qwen2's class does not have it, but its layers use it where it is
        c["head_dim"] = c.get("head_dim") or c.get("hidden_size", 0) // c.get("num_attention_heads", 1)
        rope = c.get("rope_parameters") or {}
        rope.pop("type", None)
        if rope.get("rope_type") == "yarn":
            c["rope_parameters"] = YARN | rope
        if c["model_type"].startswith("lfm"):  # its classes have no hidden_act; LFM2's adjusts a width unless told not to
            c.pop("hidden_act", None)
            multiple, factor = c.pop("block_multiple_of", 1), c.pop("block_ffn_dim_multiplier", 1)
            if c.pop("block_auto_adjust_ff_dim", False):
                c["intermediate_size"] = -(-int(factor * int(2 * c["intermediate_size"] / 3)) // multiple) * multiple
    wrong = [k for k in a.keys() | b.keys() if k not in FREE and a.get(k) != b.get(k)]
    check(f"{what}: config.json", not wrong, ", ".join(f"{k} is {b.get(k)}, not {a.get(k)}" for k in sorted(wrong)))


def golden(name):
    source, out = f"{GOLDEN}/{name}", f"{WORK}/{name}"
    flat, like = f"{out}.bin", ("--like", source)
    convert("--model", source, "--out", flat)
    for what, folder, options, dtype in (
            ("hf", "hf", ("--model", source), None), ("flat -> hf, like", "like", ("--model", flat, *like), None),
            ("flat -> hf", "own", ("--model", flat), None), ("shards", "shards", ("--model", flat, "--max-shard-size", "50KB"), None),
            *((t, t, ("--model", source, "--dtype", t), t) for t in TYPES),
            *((f"flat -> {t}, like", f"like-{t}", ("--model", flat, "--dtype", t, *like), t) for t in TYPES)):
        convert(*options, "--out", f"{out}-{folder}")
        compare(f"{name} -> {what}", source, f"{out}-{folder}", TYPES.get(dtype))
    compare_configs(f"{name} -> flat -> hf", source, f"{out}-own")
    card = ModelCard.load(f"{out}-own/README.md").data
    check(f"{name}: card", card.library_name == "transformers" and card.tags == ["streambp"], str(card))
    with open(f"{out}-shards/model.safetensors.index.json") as index:
        check(f"{name}: several files", len(set(json.load(index)["weight_map"].values())) > 1)


def random_model(name, text):
    """A model without an original: what matters is that it loads whole."""
    out = f"{WORK}/init-{name}"
    convert("--init", text, "--out", out)
    model, wrong = load(out)
    check(f"{out}: tensors", not wrong, str(wrong))
    check(f"{out}: logits", torch.isfinite(logits(model)).all())


def hub_folder(tied):
    """As the hub has hybrid models: text beside images, further heads (mtp.*), decay rates and norms of fp32 beside bf16."""
    folder = f"{WORK}/hub-tied" if tied else f"{WORK}/hub"
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
            "linear_num_key_heads": 2, "linear_num_value_heads": 6, "tie_word_embeddings": tied, "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0], "mrope_interleaved": True,
                                "partial_rotary_factor": 0.25}}
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
              "num_position_embeddings": 16}
    torch.manual_seed(11)
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=images, tie_word_embeddings=tied)).to(
        torch.bfloat16).save_pretrained(folder)
    tensors = load_file(f"{folder}/model.safetensors")
    tensors |= {k: t.float() * 1.01 for k, t in tensors.items() if k.endswith(("A_log", "linear_attn.norm.weight"))}
    tensors |= {"mtp.fc.weight": torch.randn(32, 64).to(torch.bfloat16), "mtp.norm.weight": torch.randn(32)}
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    return folder


def same_gradients(folder, text):
    """Of a composite model and of its text model alone, to the bit. Returns the first."""
    for model in (folder, text):
        train("bp", "--model", model, "--seq-len", "40", "--quiet", "--grads-out", f"{model}-grads")
    ours, known = (load_file(f"{model}-grads") for model in (folder, text))
    check(f"{folder}: gradients", ours.keys() == known.keys() and all(torch.equal(ours[k], known[k]) for k in known))
    return ours


def composite(tied):
    """The hub's folder comes back byte for byte, also by way of a flat file; its text model alone is that of transformers."""
    source = hub_folder(tied)
    out, like = f"{source}-out", ("--like", source)
    convert("--model", source, "--out", f"{out}.bin")
    for folder, options in (("", ("--model", source)), ("-like", ("--model", f"{out}.bin", "--dtype", "bf16", *like))):
        convert(*options, "--out", f"{out}{folder}")
        for name in ("config.json", "model.safetensors"):
            check(f"{out}{folder}/{name}", open(f"{source}/{name}", "rb").read() == open(f"{out}{folder}/{name}", "rb").read())
    convert("--model", source, "--to", "text", "--out", f"{out}-text")
    compare(f"{out}: text", source, f"{out}-text")
    convert("--model", f"{out}-text", *like, "--max-shard-size", "20KB", "--dtype", "fp32", "--out", f"{out}-shards")
    compare(f"{out}: fp32, shards", source, f"{out}-shards", torch.float32)
    both = [Qwen3_5ForConditionalGeneration.from_pretrained(f, dtype=torch.float32).eval() for f in (source, f"{out}-shards")]
    ids = torch.arange(40)[None]
    with torch.no_grad():
        check(f"{out}: logits beside images", torch.equal(*(m(input_ids=ids).logits for m in both)))
    ours, theirs = (m.state_dict() for m in both)
    check(f"{out}: weights beside images", all(torch.equal(ours[k], theirs[k]) for k in ours))
    convert("--model", f"{out}-text", "--dtype", "fp32", "--out", f"{out}-fp32")
    gradients = {k: tuple(t.shape) for k, t in same_gradients(source, f"{out}-text").items()}
    parameters = {k: tuple(p.shape) for k, p in load(source)[0].named_parameters()}
    check(f"{out}: names and shapes of gradients", gradients == parameters, str(gradients.items() ^ parameters.items()))
    return f"{out}-fp32"


def beside_images(name, make, text, images):
    """A composite model of another family: the same loss and gradients, its folder byte for byte, its text model alone."""
    source, out = f"{WORK}/{name}-hub", f"{WORK}/{name}-hub-out"
    torch.manual_seed(12)
    AutoModelForImageTextToText.from_config(make(
        text_config=text, vision_config=images, tie_word_embeddings=text["tie_word_embeddings"])).save_pretrained(source)
    convert("--model", source, "--out", out)
    for file in ("config.json", "model.safetensors"):
        check(f"{out}/{file}", open(f"{source}/{file}", "rb").read() == open(f"{out}/{file}", "rb").read())
    convert("--model", source, "--to", "text", "--out", f"{out}-text")
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    alone = load(f"{out}-text")[0]
    check(f"{name}: logits of the text alone", torch.equal(logits(whole), logits(alone)))
    same_gradients(source, f"{out}-text")


def whole_only(name):
    """A family of which transformers has no class of the text model alone: folders have the rest, too."""
    source, out = f"{GOLDEN}/{name}", f"{WORK}/{name}"
    convert("--model", source, "--out", f"{out}.bin")
    for options in (("--model", source), ("--model", f"{out}.bin", "--like", source)):
        convert(*options, "--out", f"{out}-{len(options)}")
        for file in ("config.json", "model.safetensors"):
            check(f"{out}/{file}", open(f"{source}/{file}", "rb").read() == open(f"{out}-{len(options)}/{file}", "rb").read())
    convert("--model", source, "--dtype", "bf16", "--out", f"{out}-bf16")
    models = [AutoModelForImageTextToText.from_pretrained(f, dtype=torch.bfloat16).eval() for f in (source, f"{out}-bf16")]
    check(f"{name}: logits in bf16", torch.equal(*map(logits, models)))
    alone = subprocess.run([TRAIN, "convert", "--model", source, "--to", "text", "--out", f"{out}-text"], capture_output=True, text=True)
    check(f"{name}: alone", alone.returncode == 1 and "has no class for the text model" in alone.stderr, alone.stderr)


def further_layer(golden):
    """A folder with a layer after the last one, in bf16 but for the router and its biases, comes back byte for byte."""
    source, out = f"{WORK}/further-{golden}", f"{WORK}/further-{golden}-out"
    load(f"{GOLDEN}/{golden}", torch.bfloat16)[0].save_pretrained(source)
    tensors = load_file(f"{source}/model.safetensors")
    check(f"{source}: types", {t.dtype for k, t in tensors.items() if "mlp.gate." in k} == {torch.float32})
    tensors |= {"model.layers.2.eh_proj.weight": torch.randn(4, 8), "model.layers.2.mlp.experts.0.up_proj.weight": torch.randn(3)}
    save_file(tensors, f"{source}/model.safetensors", metadata={"format": "pt"})
    convert("--model", source, "--out", out)
    convert("--model", source, "--to", "text", "--out", f"{out}-text")
    for name in ("config.json", "model.safetensors"):
        check(f"{out}/{name}", open(f"{source}/{name}", "rb").read() == open(f"{out}/{name}", "rb").read())
    compare(f"{out}: text", source, f"{out}-text")


def scaled(name, text, scaling, source=None, **keys):
    """--rope-scaling is what transformers makes of the same rope_scaling, in the original's config.json and in one of ours."""
    source, out = source or f"{GOLDEN}/{name}", f"{WORK}/scaled-{name}"
    config = AutoConfig.from_pretrained(source, rope_scaling=scaling, **keys)
    expected = logits(AutoModelForCausalLM.from_pretrained(source, config=config).eval())
    check(f"{out}: matters", not torch.equal(expected, logits(load(source)[0])))
    convert("--model", source, "--rope-scaling", text, "--out", out)
    convert("--model", source, "--rope-scaling", text, "--out", f"{out}.bin")
    convert("--model", f"{out}.bin", "--out", f"{out}-own")
    for folder in (out, f"{out}-own"):
        check(f"{folder}: logits", torch.equal(expected, logits(load(folder)[0])))
        check(f"{folder}: positions", AutoConfig.from_pretrained(folder).max_position_embeddings == config.max_position_embeddings)


def grown(name, source=None):
    """--grow-vocabulary: old rows are as they were, each added one is their mean; everything else stays."""
    source, out = source or f"{GOLDEN}/{name}", f"{WORK}/grown-{name}"
    old, rows = load(source)[0].state_dict(), AutoConfig.from_pretrained(source).get_text_config().vocab_size
    convert("--model", source, "--grow-vocabulary", str(rows + 5), "--out", out)
    model = load(out)[0]
    check(f"{out}: vocab_size", model.config.get_text_config().vocab_size == rows + 5 == model.get_input_embeddings().weight.shape[0])
    for key, value in model.state_dict().items():
        check(f"{out}: {key}", torch.equal(value[:rows], old[key]) if len(value) == rows + 5 else torch.equal(value, old[key]))
        if len(value) == rows + 5:
            mean = old[key].double().mean(0).to(torch.float32).expand(5, -1)
            check(f"{out}: added rows of {key}", torch.allclose(value[rows:], mean, rtol=1e-6, atol=1e-9))


def mxfp4():
    """gpt-oss's experts, decoded by `convert` as transformers does it: every scale that gives finite values."""
    source, changed = f"{GOLDEN}/gpt_oss-mxfp4", f"{WORK}/mxfp4-scales"
    convert("--model", source, "--out", f"{WORK}/mxfp4-decoded")
    compare("mxfp4, decoded", source, f"{WORK}/mxfp4-decoded")
    tensors = load_file(f"{source}/model.safetensors")
    for k, t in tensors.items():
        if k.endswith("_scales"):
            tensors[k] = (torch.arange(t.numel()) % 253).to(torch.uint8).reshape(t.shape)
    shutil.copytree(source, changed)
    save_file(tensors, f"{changed}/model.safetensors", metadata={"format": "pt"})
    convert("--model", changed, "--out", f"{changed}-decoded")
    ours = load_file(f"{changed}-decoded/model.safetensors")
    for k, t in tensors.items():
        if k.endswith("_blocks"):
            theirs = convert_moe_packed_tensors(t, tensors[k.replace("_blocks", "_scales")])
            ours_k = ours[k.removesuffix("_blocks")]
            check(f"mxfp4, every scale: {k}", torch.equal(ours_k.view(torch.int16), theirs.view(torch.int16)))


def hybrid_names():
    """olmo_hybrid: the published names and widths are written, and read as well as transformers' thirds and its names in memory."""
    source, out = f"{GOLDEN}/olmo_hybrid", f"{WORK}/hybrid-names"
    expected = {k: p.detach() for k, p in load(source)[0].named_parameters()}
    convert("--model", source, "--out", out)
    written = load_file(f"{out}/model.safetensors")
    widths = [tuple(written[f"model.layers.0.linear_attn.{c}_conv1d.weight"].shape) for c in "qkv"]
    norms = {k.removeprefix("model.layers.") for k in written if "norm" in k and "layers." in k and "self_attn" not in k}
    check(f"{out}: widths", widths == [(18, 1, 4), (18, 1, 4), (28, 1, 4)], str(widths))
    check(f"{out}: norms", norms == {f"{l}.{n}.weight" for l, names in (
        (0, ("attention_layer_norm", "feedforward_layer_norm", "linear_attn.o_norm")), (1, ("post_attention_layernorm", "post_feedforward_layernorm")),
        (2, ("attention_layer_norm", "feedforward_layer_norm", "linear_attn.o_norm"))) for n in names}, str(norms))
    losses = {json.loads(train("bp", "--model", f, "--seq-len", "40", "--json", "--quiet"))["loss"] for f in (source, out)}
    for name, tensors in (("memory", expected), ("wide", written | {"model.layers.2.linear_attn.k_conv1d.weight": torch.zeros(20, 1, 4)})):
        shutil.copytree(out, f"{out}-{name}")
        save_file({k: t.contiguous() for k, t in tensors.items()}, f"{out}-{name}/model.safetensors", metadata={"format": "pt"})
    losses.add(json.loads(train("bp", "--model", f"{out}-memory", "--seq-len", "40", "--json", "--quiet"))["loss"])
    check(f"{out}: one loss", len(losses) == 1, str(losses))
    wide = subprocess.run([TRAIN, "bp", "--model", f"{out}-wide", "--seq-len", "8"], capture_output=True, text=True)
    check(f"{out}: channels", wide.returncode == 1 and "config.json asks for 64" in wide.stderr, wide.stderr)


WHOLE = ("muse_glimmer",)
LIKE_OTHERS = () if os.environ.get("ALL_CASES") else (
    "qwen3_5-full", "qwen3_5-heads", "qwen3_5-linear", "qwen3_5-one")
names = sorted(d for d in os.listdir(GOLDEN) if os.path.exists(f"{GOLDEN}/{d}/reference.safetensors") and d not in LIKE_OTHERS + WHOLE)
check("golden models", len(names) >= 9)
for name in names:
    golden(name)
for name in WHOLE:
    whole_only(name)
YARN4 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
for name in ("llama", "llama-sharded", "qwen3"):  # of transformers 5, of 4, with a head_dim
    theta = AutoConfig.from_pretrained(f"{GOLDEN}/{name}").rope_parameters["rope_theta"]
    scaled(name, "yarn,factor=4,original_max_position_embeddings=16", YARN4 | {"rope_theta": theta}, max_position_embeddings=64)
scaled("mistral", "linear,factor=2.5", {"rope_type": "linear", "factor": 2.5, "rope_theta": AutoConfig.from_pretrained(
    f"{GOLDEN}/mistral").rope_parameters["rope_theta"]}, max_position_embeddings=int(2.5 * 128))
for tied in (True, False):
    hybrid = composite(tied)
grown("qwen3_5-hub", hybrid)
mxfp4()
hybrid_names()
for name in ("llama", "llama-tied", "gpt2", "glm4_moe"):
    grown(name)
TEXT = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
IMAGES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
          "patch_size": 14}
LATENTS = {"q_lora_rank": 8, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 6, "v_head_dim": 12, "n_routed_experts": 4,
           "moe_intermediate_size": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
beside_images("mistral4", Mistral3Config, {k: v for k, v in TEXT.items() if k != "head_dim"} | LATENTS | {
    "model_type": "mistral4", "tie_word_embeddings": False}, IMAGES | {"model_type": "pixtral", "head_dim": 8})
for name, tied in (("ministral3", True), ("mistral", False)):
    beside_images(name, Mistral3Config, TEXT | {"model_type": name, "tie_word_embeddings": tied}, IMAGES | {"model_type": "pixtral", "head_dim": 8})
beside_images("qwen3_5_moe", Qwen3_5MoeConfig, TEXT | {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "tie_word_embeddings": False, "layer_types": ["linear_attention", "full_attention"]}, {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2,
        "num_position_embeddings": 16})
for name in ("glm4_moe", "deepseek_v3"):
    further_layer(name)
TEXT4 = TEXT | {"sliding_window": 9, "tie_word_embeddings": True, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 6}
beside_images("gemma4", Gemma4Config, TEXT4, {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8})
beside_images("gemma4_unified", Gemma4UnifiedConfig, TEXT | {"sliding_window": 9, "tie_word_embeddings": True}, {
    "patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8, "output_proj_dims": 32})
beside_images("gemma3", Gemma3Config, TEXT | {"sliding_window": 9, "tie_word_embeddings": True}, IMAGES)
scaled("qwen3_5-hub", "yarn,factor=4,original_max_position_embeddings=16", YARN4 | {
    "rope_theta": 1e6, "partial_rotary_factor": 0.25}, source=hybrid, max_position_embeddings=64)
convert("--model", f"{GOLDEN}/gpt2/gpt2_llmc_fp32.bin", "--out", f"{WORK}/llmc")
compare("llm.c -> hf", f"{GOLDEN}/gpt2", f"{WORK}/llmc")
SMALL = "hidden_size=32,intermediate_size=52,num_hidden_layers=2,num_attention_heads=4,vocab_size=99"
random_model("gpt2", "gpt2,n_embd=36,n_layer=2,n_head=3,vocab_size=77,n_positions=50")
for family in ("llama", "qwen2", "qwen3"):
    random_model(family, f"{family},{SMALL},num_key_value_heads=2,head_dim=16,tie_word_embeddings=true")
LINEAR = "linear_num_key_heads=2,linear_num_value_heads=4,linear_key_head_dim=6,linear_value_head_dim=10"
MAMBA = "linear_num_key_heads=2,linear_num_value_heads=4,linear_key_head_dim=6,linear_value_head_dim=8"
for pattern in ("l", "f", "flll", "lf"):
    random_model(f"qwen3_5-{pattern}", f"qwen3_5,{SMALL},num_key_value_heads=2,head_dim=8,layer_types={pattern},{LINEAR}")
random_model("mistral", f"mistral,{SMALL},num_key_value_heads=1,sliding_window=3")
random_model("mistral-full", f"mistral,{SMALL},num_key_value_heads=1,sliding_window=0,rope_type=yarn,factor=2")
random_model("qwen-windows", f"qwen2,{SMALL},num_key_value_heads=2,sliding_window=5,layer_types=sf")
for pattern in ("s", "f", "fs", "sf"):
    random_model(f"gemma3-{pattern}", f"gemma3,{SMALL},num_key_value_heads=2,head_dim=6,sliding_window=5,layer_types={pattern},"
                 "rope_type=llama3,factor=8,low_freq_factor=1,high_freq_factor=4,original_max_position_embeddings=64")
for number, (family, keys) in enumerate((
        ("qwen3_moe", "num_experts=6,num_experts_per_tok=3,moe_intermediate_size=8,mlp_only_layers=1,head_dim=8"),
        ("mixtral", "num_experts=4"), ("gpt_oss", "num_experts=3,num_experts_per_tok=2,head_dim=8,sliding_window=5"), ("glm4_moe", "num_experts=4,moe_intermediate_size=8,num_experts_per_tok=2,use_qk_norm=true"),
        ("ministral3", "original_max_position_embeddings=16,head_dim=10"), ("ministral3", "rope_type=default,sliding_window=4,head_dim=8"),
        ("ministral3", "rope_type=linear,factor=2,head_dim=8"), ("smollm3", "layer_types=nf,mlp_bias=true,rope_type=linear,factor=3"),
        ("olmo2", "attention_bias=true,rope_theta=500000"), ("olmo3", "layer_types=fs,sliding_window=4,rope_local_base_freq=3000"),
        ("olmo3", "layer_types=sf,sliding_window=4,rope_type=yarn,factor=8,original_max_position_embeddings=32"),
        ("phi3", "partial_rotary_factor=0.75,sliding_window=6"), ("phi3", "tie_word_embeddings=true"),
        ("glm4", "head_dim=12,rope_type=yarn,factor=4,original_max_position_embeddings=32"), ("glm4", "attention_bias=false,head_dim=8"),
        ("gemma4", "layer_types=sf,head_dim=8,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=8,hidden_size_per_layer_input=6"),
        ("qwen3_next", f"head_dim=8,layer_types=lf,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=8,mlp_only_layers=1,{LINEAR}"),
        ("granitemoehybrid", f"head_dim=8,layer_types=lf,num_experts=4,moe_intermediate_size=8,time_step_max=0.9,{MAMBA}"),
        ("granitemoehybrid", f"layer_types=ln,num_experts=0,time_step_min=0.6,{MAMBA}"), ("bamba", f"layer_types=lf,mlp_bias=true,{MAMBA}"),
        ("olmo_hybrid", f"layer_types=ln,{LINEAR}"), ("olmo_hybrid", "linear_allow_neg_eigval=false,rope_type=yarn,factor=4"),
        ("seed_oss", "head_dim=8,rope_type=yarn,factor=4"), ("hunyuan_v1_dense", "head_dim=8,rope_type=dynamic,alpha=100,attention_bias=true"),
        ("ernie4_5", "head_dim=8,attention_bias=true"), ("lfm2", "head_dim=8,layer_types=cf"), ("lfm2", "layer_types=c,linear_conv_kernel_dim=2"),
        ("lfm3", "head_dim=8,layer_types=cs,sliding_window=5,attention_bias=true"), ("lfm2_moe", "layer_types=fc,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=8,first_k_dense_replace=1"),
        ("granite", "embedding_multiplier=12,attention_multiplier=0.3,residual_multiplier=0.22,logits_scaling=0.4,mlp_bias=true"))):
    random_model(f"{family}-{number}", f"{family},{SMALL},num_key_value_heads=2,{keys}")
random_model("glm4_moe_lite", f"glm4_moe_lite,{SMALL},q_lora_rank=12,kv_lora_rank=20,qk_nope_head_dim=10,qk_rope_head_dim=6,v_head_dim=16,"
             "num_experts=4,moe_intermediate_size=8,shared_expert_intermediate_size=8,num_experts_per_tok=2,mlp_only_layers=1,"
             "rope_type=yarn,factor=4,original_max_position_embeddings=32,mscale=1,mscale_all_dim=1")
for family, keys in (("deepseek_v3", "v_head_dim=9,q_lora_rank=0,first_k_dense_replace=1,n_group=2,topk_group=1"),
                     ("mistral4", "v_head_dim=16,q_lora_rank=12,n_group=1,topk_group=1,original_max_position_embeddings=16,factor=8")):
    random_model(family, f"{family},{SMALL},kv_lora_rank=20,qk_nope_head_dim=8,qk_rope_head_dim=8,num_experts=4,moe_intermediate_size=8,"
                 f"shared_expert_intermediate_size=16,num_experts_per_tok=2,{keys}")
random_model("biases", f"llama,{SMALL},attention_bias=true,mlp_bias=true,rope_theta=123456.7,rms_norm_eps=3e-7")
trials()
family_trials()
close()
