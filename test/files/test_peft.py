"""Adapters between this program and PEFT, both ways: the loss of adapters that the one made is what the other says, and the merged
model is PEFT's merge_and_unload. test_peft.py TRAIN WORK: the program, an empty folder.
"""
import json
import warnings

from checks import GOLDEN, WORK, check, close, train

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma4Config, Gemma4ForConditionalGeneration
from transformers.utils import logging

logging.disable_progress_bar()

T, DOCUMENTS = 48, 6
SHARD = f"{GOLDEN}/tokens_uint16.bin"  # llm.c's: a header of 1024 bytes, then tokens
DATA = ["--data", SHARD, "--seq-len", str(T)]
EXPERTS = ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "mixtral", "glm4_moe", "lfm2_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v3-full")
STACKS = ("gpt_oss", "gemma4-moe", "mistral4")  # PEFT's all-linear leaves their experts out


def folder(name):
    return f"{WORK}/{name}" if name in ("gemma4-moe", "gemma4-images") else f"{GOLDEN}/{name}"


def our_loss(*arguments):
    return json.loads(train("eval", *DATA, "--val-steps", str(DOCUMENTS), "--json", "--quiet", *arguments))["loss"]


def document_loss(model, d):
    with open(SHARD, "rb") as file:
        tokens = torch.frombuffer(bytearray(file.read()[1024:]), dtype=torch.uint16).to(torch.int64)
    ids = tokens[d * T:d * T + T + 1]
    return torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0].double(), ids[1:])


def auto_class(name):
    return AutoModelForImageTextToText if name in ("muse_glimmer", "mistral4") else AutoModelForCausalLM  # as in make_golden.py


def open_base(name):
    experts = {"experts_implementation": "eager"} if name in EXPERTS + STACKS + ("nemotron_h", "granitemoehybrid") else {}  # the only one in double
    return auto_class(name).from_pretrained(folder(name), dtype=torch.float32, **experts)


def their_loss(model):
    """Of the same documents; in double."""
    with torch.no_grad():
        return sum(document_loss(model, d).item() for d in range(DOCUMENTS)) / DOCUMENTS


def same_gradients(what, name, adapter):
    """Of the first document: an embedding's A has none from inputs of the pad token, its B has."""
    model = PeftModel.from_pretrained(open_base(name), adapter, is_trainable=True).double().eval()
    document_loss(model, 0).backward()
    train("bp", *DATA, "--batch", "1", "--model", folder(name), "--adapter", adapter, "--quiet", "--grads-out", f"{adapter}.grads")
    ours, theirs = load_file(f"{adapter}.grads"), dict(model.named_parameters())
    off = {k: (g - theirs[held_name(k)].grad).norm() / theirs[held_name(k)].grad.norm() for k, g in ours.items()}
    check(f"{what}: gradients", max(off.values()) < 1e-5, max(off, key=off.get))


def load(name, adapter=None):
    model = open_base(name)
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).double().eval()


def agree(what, ours, theirs):
    check(what, abs(ours - theirs) <= 1e-5 * abs(theirs), f"{ours}, not {theirs}")


def merged(what, name, adapter):
    """convert --merge, to a folder and by way of a flat file, is PEFT's merge."""
    out = f"{WORK}/{what}-merged"
    train("convert", "--model", folder(name), "--adapter", adapter, "--merge", "--out", out, "--quiet")
    train("convert", "--model", folder(name), "--adapter", adapter, "--merge", "--out", f"{out}.bin", "--quiet")
    train("convert", "--model", f"{out}.bin", "--like", folder(name), "--out", f"{out}-flat", "--quiet")
    expected = load(name, adapter).merge_and_unload().state_dict()
    found, flat = (auto_class(name).from_pretrained(f, dtype=torch.float32).state_dict() for f in (out, f"{out}-flat"))
    check(f"{what}: flat and folder have the same bits", all(torch.equal(found[k], flat[k]) for k in found))
    check(f"{what}: merged weights are W + scale B A, rounded",
          all(torch.allclose(found[k].double(), expected[k].double(), rtol=1.3e-7, atol=1e-12) for k in expected))
    return out


def held_name(key):
    """In PEFT's model, of a name in its files."""
    if "lora_embedding_" in key:
        return f"{key}.default"
    if "lora_" not in key:
        return key.replace(".weight", ".modules_to_save.default.weight")
    return key.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")


def ours_to_theirs(name, *options):
    """Trained here, read by PEFT; nothing that it warns of."""
    what, run = f"ours {name} {' '.join(options)}", f"{WORK}/ours-{name}-{len(options)}"
    train("train", *DATA, "--model", folder(name), "--lora-rank", "4", "--steps", "6", "--lr", "0.05", "--quiet", "--seed",
          "5", "--out", run, *options)
    adapter = f"{run}/checkpoint-00000006"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load(name, adapter)
    said = [str(w.message) for w in said if "adapter" in str(w.message).lower() or "peft" in str(w.message).lower()]
    check(f"{what}: PEFT has nothing to say", not said, "; ".join(said))
    tensors, held = load_file(f"{adapter}/adapter_model.safetensors"), model.state_dict()
    names = {held_name(k): v for k, v in tensors.items()}
    check(f"{what}: every tensor is in PEFT's model", names.keys() == {k for k in held if "lora_" in k or "modules_to_save" in k})
    check(f"{what}: with its values", all(torch.equal(held[k].float(), v) for k, v in names.items()))
    theirs, base = their_loss(model), our_loss("--model", folder(name))
    agree(f"{what}: loss", our_loss("--model", folder(name), "--adapter", adapter), theirs)
    agree(f"{what}: loss by the run's folder", our_loss("--model", folder(name), "--adapter", run), theirs)
    check(f"{what}: training has changed it", abs(theirs - base) > 1e-3, f"{theirs}")
    agree(f"{what}: merged loss", our_loss("--model", merged(what.replace(" ", ""), name, adapter)), theirs)


def theirs_to_ours(name, what, dtype=torch.float32, mergeable=True, **config):
    """Made by PEFT, with B that is not zero."""
    torch.manual_seed(3)
    what, adapter = f"theirs {name}, {what}", f"{WORK}/theirs-{name}-{what.replace(' ', '')}"
    model = get_peft_model(open_base(name), LoraConfig(task_type="CAUSAL_LM", **config), autocast_adapter_dtype=False)
    for key, value in model.named_parameters():
        if "lora_" in key or "modules_to_save" in key:
            value.data = (0.2 * torch.randn_like(value)).to(dtype)
    model.save_pretrained(adapter)
    theirs = their_loss(load(name, adapter))
    agree(f"{what}: loss", our_loss("--model", folder(name), "--adapter", adapter), theirs)
    if "outer" in what:
        same_gradients(what, name, adapter)
    if mergeable:
        agree(f"{what}: merged loss", our_loss("--model", merged(what.replace(" ", "").replace(",", "-"), name, adapter)), theirs)
    train("train", *DATA, "--model", folder(name), "--adapter", adapter, "--steps", "1", "--lr", "0", "--weight-decay", "0",
          "--quiet", "--out", f"{adapter}-on")
    ours, start = (load_file(f"{f}/adapter_model.safetensors") for f in (f"{adapter}-on/checkpoint-00000001", adapter))
    start = {k: v for k, v in start.items() if not k.endswith("base_layer.weight")}  # PEFT saves the head's base, too
    check(f"{what}: training goes on from it", all(torch.equal(ours[k], start[k].float()) for k in start) and len(ours) == len(start))


def per_expert(name, *options):
    """With a tensor for each expert, read back here; PEFT reads such a folder of families whose names it converts."""
    run, split = f"{WORK}/split-{name}", f"{WORK}/split-{name}-each"
    train("train", *DATA, "--model", folder(name), "--steps", "6", "--lr", "0.05", "--quiet", "--out", run, *options)
    train("convert", "--model", run, "--adapter-only", "--adapter-layout", "per-expert", "--out", split, "--quiet")
    whole = our_loss("--model", folder(name), "--adapter", run)
    check(f"per expert {name}: read back", our_loss("--model", folder(name), "--adapter", split) == whole)
    check(f"per expert {name}: shapes", all(v.dim() == 2 for v in load_file(f"{split}/adapter_model.safetensors").values()))
    if name == "mixtral":
        agree(f"per expert {name}: PEFT's loss", whole, their_loss(load(name, split)))


for golden in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "ministral3", "smollm3", "olmo3", "phi3", "glm4", "seed_oss",
               "hunyuan_v1_dense", "ernie4_5", "lfm2", "lfm3", "glm4_moe_lite", "deepseek_v3", "deepseek_v3-full", "mistral4"):
    ours_to_theirs(golden)
ours_to_theirs("llama", "--rslora", "--lora-alpha", "3", "--lora-targets", "q_proj,v_proj,down_proj", "--lora-dropout", "0.1")
ours_to_theirs("gpt2", "--lora-targets", "c_attn,mlp.c_proj")
ours_to_theirs("qwen3", "--lora-layers", "1", "--lora-rank-pattern", r"q_proj=2,.*\.mlp\..*=6", "--lora-alpha-pattern", "k_proj=3")
ours_to_theirs("qwen3", "--lora-targets", "q_proj", "--lora-modules-to-save", "embed_tokens,lm_head")
ours_to_theirs("llama", "--lora-targets", "embed_tokens,lm_head,o_proj", "--lora-dropout", "0.1", "--lora-rank-pattern", "lm_head=3")
ours_to_theirs("qwen3_5", "--lora-targets", r".*\.[02]\.(mlp|linear_attn)\..*|.*q_proj", "--lora-alpha-pattern", "layers.0.mlp.up_proj=1")
ours_to_theirs("granite", "--lora-targets", "embed_tokens,lm_head,down_proj")
ours_to_theirs("qwen3_5")
ours_to_theirs("qwen3_5", "--lora-targets", "q_proj,in_proj_b,in_proj_qkv")
ours_to_theirs("qwen3_5", "--lora-targets", "o_proj", "--rslora")
theirs_to_ours("qwen3_5", "some", r=2, lora_alpha=3, target_modules=["v_proj", "in_proj_a", "in_proj_z", "out_proj"])
ours_to_theirs("lfm2", "--lora-targets", "in_proj,self_attn.out_proj,w2", "--lora-rank-pattern", "in_proj=3")
for golden in ("llama", "qwen3", "gemma3", "qwen3_5", "olmo2", "phi3", "glm4", "lfm2", "lfm3"):
    theirs_to_ours(golden, "all-linear", r=3, lora_alpha=5, target_modules="all-linear")
theirs_to_ours("qwen2", "some", r=8, lora_alpha=8, target_modules=["q_proj", "up_proj"], use_rslora=True, lora_dropout=0.2)
theirs_to_ours("llama", "regular expression", r=2, lora_alpha=1, target_modules=r".*\.mlp\.(gate|down)_proj")
theirs_to_ours("llama", "patterns", r=4, lora_alpha=6, target_modules=r"(?:.*?\.)?layers\.\d+\.(?!mlp\.up).*_proj",
               exclude_modules=r".*\.0\.self_attn\.[vo]_proj", rank_pattern={r"layers\.[1-9].*[qk]_proj": 2, "down_proj": 5},
               alpha_pattern={r"^model\.layers\.0\..*": 9, "self_attn.k_proj": 1})  # PEFT saves patterns sorted
theirs_to_ours("qwen3", "layers", r=3, lora_alpha=5, target_modules=["q_proj", "gate_proj", "model.layers.0.mlp.up_proj"],
               layers_to_transform=[1], layers_pattern="layers", use_rslora=True, rank_pattern={"gate_proj": 1})
for saved in (["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]):
    theirs_to_ours("llama" if len(saved) > 1 else "qwen3_5", " ".join(saved), r=2, lora_alpha=4, target_modules=["v_proj", "down_proj"],
                   modules_to_save=saved)
theirs_to_ours("qwen3", "outer", r=3, lora_alpha=4, target_modules=["v_proj", "embed_tokens", "lm_head"], rank_pattern={"lm_head": 5},
               alpha_pattern={"embed_tokens": 1})
theirs_to_ours("gemma3", "outer", mergeable=False, r=2, lora_alpha=1, target_modules=["q_proj", "embed_tokens"])
theirs_to_ours("olmo3", "outer", mergeable=False, r=2, lora_alpha=3, target_modules=["v_proj", "embed_tokens"])  # has a pad token
theirs_to_ours("gpt2", "outer", mergeable=False, r=2, lora_alpha=1, target_modules=["wte", "lm_head", "c_fc"], use_rslora=True)
theirs_to_ours("gpt2", "patterns", r=4, lora_alpha=2, target_modules=["c_attn", "c_proj"], layers_to_transform=1,
               exclude_modules=["mlp.c_proj"], rank_pattern={"c_attn": 7}, alpha_pattern={"h.1.attn.c_attn": 3})
theirs_to_ours("mistral", "bf16", dtype=torch.bfloat16, r=4, lora_alpha=16, target_modules=["k_proj", "o_proj"])
theirs_to_ours("gpt2", "default", r=4, lora_alpha=2)
theirs_to_ours("gpt2", "all", r=4, lora_alpha=2, fan_in_fan_out=True, target_modules=["c_attn", "c_proj", "c_fc"])
# Experts: of another rank than theirs, so that the order of A and B shows.
ours_to_theirs("qwen3_moe", "--lora-targets", "all-linear", "--lora-rank-pattern", "experts.down_proj=3")
ours_to_theirs("qwen3_moe", "--lora-targets", "experts,q_proj,gate", "--lora-layers", "0", "--lora-rank-pattern", "gate.weight=2", "--rslora")
ours_to_theirs("qwen3_5_moe", "--lora-targets", "experts.gate_up_proj,gate,shared_expert.up_proj,shared_expert_gate,o_proj")
ours_to_theirs("qwen3_next", "--lora-targets", "in_proj_qkvz,in_proj_ba,experts,shared_expert_gate", "--lora-rank-pattern",
               "in_proj_qkvz=3")  # of fused rows, which share A
ours_to_theirs("mixtral", "--lora-targets", "experts.down_proj,k_proj")
ours_to_theirs("lfm2_moe", "--lora-targets", "in_proj,experts,gate", "--lora-rank-pattern", "experts.down_proj=3")
theirs_to_ours("qwen3_moe", "parameters", r=3, lora_alpha=5, target_modules=["v_proj"],
               target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"])
theirs_to_ours("mixtral", "gates", r=3, lora_alpha=5, target_modules=[], target_parameters=["experts.gate_up_proj", "gate.weight"])
# PEFT refuses out_proj, and so all-linear; inputs of Mamba-2 share A.
ours_to_theirs("nemotron_h", "--lora-targets", "in_proj,q_proj,shared_experts.up_proj,experts.up_proj,experts.down_proj,gate",
               "--lora-rank-pattern", "in_proj=3,experts.down_proj=2")
theirs_to_ours("nemotron_h", "branches", r=3, lora_alpha=5, target_modules=["in_proj", "q_proj", "up_proj", "down_proj"],
               target_parameters=["mixer.experts.up_proj", "mixer.experts.down_proj", "mixer.gate.weight"])
# Granite's experts and router are parameters, which all-linear leaves out; its shared MLP fuses gate and up.
ours_to_theirs("granitemoehybrid", "--lora-targets", "in_proj,out_proj,input_linear,experts.gate_up_proj,experts.down_proj,router",
               "--lora-rank-pattern", "in_proj=3,experts.down_proj=2,input_linear=5")
theirs_to_ours("granitemoehybrid", "parameters", r=3, lora_alpha=5, target_modules=["out_proj", "k_proj", "output_linear"],
               target_parameters=["experts.gate_up_proj", "experts.down_proj", "router.weight"])
for golden in ("granitemoehybrid", "granitemoehybrid-dense", "bamba"):
    ours_to_theirs(golden)
    theirs_to_ours(golden, "all-linear", r=3, lora_alpha=5, target_modules="all-linear")
per_expert("nemotron_h", "--lora-targets", "experts.up_proj,experts.down_proj,in_proj", "--lora-rank", "3")
for golden in EXPERTS:
    theirs_to_ours(golden, "all-linear", r=3, lora_alpha=5, target_modules="all-linear")
for golden in ("mixtral", "qwen3_5_moe"):
    per_expert(golden, "--lora-targets", "experts,gate,q_proj", "--lora-rank", "3")
# Stacks that files hold transposed, with rows of gates and up projections in turn; a router that is a linear layer; layers without
# keys or values of their own.
train("convert", "--init", "gemma4,hidden_size=32,intermediate_size=24,num_hidden_layers=2,layer_types=sf,num_attention_heads=4,"
      "num_key_value_heads=2,head_dim=8,global_head_dim=16,num_global_key_value_heads=1,attention_k_eq_v=true,vocab_size=96,"
      "hidden_size_per_layer_input=0,num_experts=4,num_experts_per_tok=2,moe_intermediate_size=16,initializer_range=0.2", "--seed", "3",
      "--out", folder("gemma4-moe"), "--quiet")
ours_to_theirs("gpt_oss", "--lora-targets", "experts,router,o_proj", "--lora-rank-pattern", "experts.down_proj=3")
theirs_to_ours("gpt_oss", "all-linear", r=3, lora_alpha=5, target_modules="all-linear", target_parameters=["1.mlp.experts.gate_up_proj"])
per_expert("gpt_oss", "--lora-targets", "experts,q_proj", "--lora-rank", "3")
ours_to_theirs("gemma4-moe", "--lora-targets", "experts,down_proj,router.proj,v_proj", "--lora-rank-pattern", "experts.gate_up_proj=3")
theirs_to_ours("gemma4-moe", "all-linear", r=3, lora_alpha=5, target_modules="all-linear", target_parameters=["experts.down_proj"])
ours_to_theirs("gemma4-e")
theirs_to_ours("gemma4-e", "some", r=3, lora_alpha=5, target_modules=["v_proj", "up_proj", "per_layer_projection"])
# Text beside images: names of the whole model, whose other parts have modules of the same names.
torch.manual_seed(3)
Gemma4ForConditionalGeneration(Gemma4Config(
    text_config={"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 8, "global_head_dim": 16, "vocab_size": 112, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
                 "layer_types": ["sliding_attention", "full_attention", "full_attention"], "initializer_range": 0.2, "pad_token_id": 0},
    vision_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                   "num_key_value_heads": 2, "head_dim": 8}, audio_config=None, image_token_id=109, video_token_id=110,
    audio_token_id=111)).save_pretrained(folder("gemma4-images"))
ours_to_theirs("gemma4-images", "--lora-targets", "all", "--lora-rank-pattern", "layers.1.self_attn.q_proj=3")
theirs_to_ours("gemma4-images", "text", r=3, lora_alpha=5, target_modules=r"model\.language_model\..*\.(q_proj|down_proj)")
ours_to_theirs("muse_glimmer", "--lora-targets", "all")
theirs_to_ours("muse_glimmer", "text", r=3, lora_alpha=5, target_modules=r"model\.language_model\..*\.(gate_proj|q_proj|k_proj)")
ours_to_theirs("olmo_hybrid", "--lora-targets", "linear_attn.k_proj,linear_attn.v_proj,a_proj,g_proj,q_proj,o_proj,down_proj", "--lora-rank-pattern",
               "linear_attn.v_proj=3")
theirs_to_ours("olmo_hybrid", "some", r=3, lora_alpha=5, target_modules=["v_proj", "b_proj", "up_proj", "linear_attn.o_proj"])
theirs_to_ours("olmo_hybrid", "all-linear", r=3, lora_alpha=5, target_modules="all-linear")
with safe_open(f"{WORK}/ours-llama-0/checkpoint-00000006/adapter_model.safetensors", "pt") as file:
    check("the base is recorded", len(file.metadata().get("streambp_base", "")) == 35)
close()
