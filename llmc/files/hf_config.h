/*
Reads config.json of a Hugging Face model (hf_config_write.h writes it). Reading takes the classic keys (rope_theta,
rope_scaling, torch_dtype) and the keys of transformers 5 (rope_parameters, dtype); an absent key has the default of its
config class. In a composite model (text and images) it takes text_config. It refuses by name every setting with which
the model would compute something else: architectures, activations, other rope types, soft caps, quantisation,
impossible values. Both directions walk config_keys (config.h) and the table of hf_constants.h, so a new key is read and
written under its own name.
*/
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H
#include "hf_constants.h"
#include "llmc/base/dtype.h"
#include "llmc/base/file.h"

#define HF_CONFIG_MAX ((size_t)16 << 20) // most bytes read of a config.json or an index
#define HF_THETA      10000              // transformers' default of rope_theta, unless the class has another

static const char *hf_dtype_name(DType type) {
    static const char *const names[DTYPE_FLOATS] = {"float32", "bfloat16", "float64", "float16"};
    return names[type];
}

// Returns the type with this name, except double; DTYPE_COUNT: none
static DType hf_dtype_find(const cJSON *name) {
    for (int i = DTYPE_FP32; i < DTYPE_FLOATS; i++)
        if (i != DTYPE_FP64 && json_is(name, hf_dtype_name((DType)i))) return (DType)i;
    return DTYPE_COUNT;
}

// Reads the rows and columns of blocks. Leaves them unchanged if the list is absent; null: one block.
static void hf_read_block(QuantFormat *format, const cJSON *list, const char *path) {
    size_t *const to[] = {&format->grid.block_rows, &format->block};
    if (!list) return;
    if (!cJSON_IsNull(list) && cJSON_GetArraySize(list) != 2)
        die("%s: quantization_config: a size of blocks is not a list such as [128, 128]; download it again", path);
    for (size_t i = 0; i < 2; i++) {
        const cJSON *item = cJSON_GetArrayItem(list, (int)i);
        if (item && !(cJSON_IsNumber(item) && item->valuedouble >= 1 && item->valuedouble <= 1e9))
            die("%s: quantization_config: a size of blocks is not a whole number above 0; download it again", path);
        *to[i] = item ? (size_t)item->valuedouble : 0;
    }
}

#define HF_MODELOPT "hf_quant_config.json" // ModelOpt's quantization_config, in folders whose config.json has none

// Reads FP8 and MXFP8 of quant_method fp8, compressed-tensors and modelopt. A format without block_rows and block has a
// scale for a tensor, a format with block_rows 1 and no block a scale for a row. Returns type QUANT_NONE for other
// methods.
static QuantFormat hf_config_fp8(const cJSON *quantised, const char *path) {
    const cJSON *method = json_get(quantised, "quant_method"), *groups = json_get(quantised, "config_groups"), *group;
    const cJSON *fmt = json_get(quantised, "fmt"), *experts = json_get(quantised, "expert_dtype");
    const cJSON *kind = json_get(quantised, json_is(method, "modelopt") ? "quant_algo" : "format");
    const int own = json_is(method, "fp8");
    QuantFormat format = {QUANT_NONE, 0, 0, DTYPE_BF16, {0}};
    char value[64];
    if (!own && !json_is(method, "modelopt") && !json_is(method, "compressed-tensors")) return format;
    if (own) kind = fmt && !json_is(fmt, "e4m3") ? fmt : experts && !json_is(experts, "fp8") ? experts : method;
    const int micro = json_is(kind, "MXFP8") || json_is(kind, "mxfp8-quantized");
    int fits = micro || json_is(kind, "fp8") || json_is(kind, "FP8") || json_is(kind, "float-quantized") ||
               json_is(kind, "naive-quantized");
    if (own) format = quant_format(QUANT_FP8, DTYPE_BF16);
    format.type = QUANT_FP8;
    if (micro) format.grid.block_rows = 1, format.block = MXFP8_BLOCK;
    hf_read_block(&format, cJSON_GetObjectItemCaseSensitive(quantised, "weight_block_size"), path); // null: one block
    cJSON_ArrayForEach(group, groups) {
        const cJSON *weights = json_get(group, "weights"), *bits = json_get(weights, "num_bits");
        fits &= !weights || (json_is(json_get(weights, "type"), "float") && bits && bits->valuedouble == 8);
        if (json_is(json_get(weights, "strategy"), "channel")) format.grid.block_rows = 1;
        if (json_is(json_get(weights, "strategy"), "block"))
            hf_read_block(&format, json_get(weights, "block_structure"), path);
    }
    if (!fits)
        die("%s: quantization_config (%s, %s): only FP8 and MXFP8 are supported of it; take the bf16 model, with "
            "--base fp8 or nf4 to quantise it",
            path, method->valuestring, kind ? json_scalar_text(kind, value, sizeof(value)) : "no format");
    return format;
}

// Reads the format of quantization_config; QUANT_NONE: absent. Refuses every other quantisation method, and mxfp4 of
// any model but gpt-oss.
static QuantFormat hf_config_quantised(const cJSON *root, const char *path) {
    const cJSON *quantised = json_get(root, "quantization_config"), *method = json_get(quantised, "quant_method");
    const cJSON *type = json_get(quantised, "bnb_4bit_quant_type");
    const DType dtype = hf_dtype_find(json_get(root, json_get(root, "dtype") ? "dtype" : "torch_dtype"));
    char value[64];
    QuantFormat format = {QUANT_NONE, 0, QUANT_BLOCK, dtype == DTYPE_COUNT ? DTYPE_BF16 : dtype, {0}};
    if (!quantised || cJSON_IsNull(quantised)) return format;
    if (json_is(method, "mxfp4") && json_is(json_get(root, "model_type"), "gpt_oss"))
        return quant_format(QUANT_MXFP4, DTYPE_BF16);
    const QuantFormat fp8 = hf_config_fp8(quantised, path);
    if (fp8.type != QUANT_NONE) return fp8;
    if (!json_is(method, "bitsandbytes") || !cJSON_IsTrue(json_get(quantised, "load_in_4bit")))
        die("%s: quantization_config (%s%s): only FP8, 4 bits of bitsandbytes, and mxfp4 of gpt_oss are supported; "
            "take "
            "the original model and --base nf4",
            path, method ? json_scalar_text(method, value, sizeof(value)) : "no method named",
            cJSON_IsTrue(json_get(quantised, "load_in_8bit")) ? " in 8 bits" : "");
    for (int i = QUANT_NF4; i <= QUANT_FP4; i++) // fp4 is bitsandbytes' default
        if (!strcmp(cJSON_IsString(type) ? type->valuestring : "fp4", quant_type_names[i])) format.type = (QuantType)i;
    if (format.type == QUANT_NONE)
        die("%s: bnb_4bit_quant_type is %s; only nf4 and fp4 are supported; take the original model and --base nf4",
            path, json_scalar_text(type, value, sizeof(value)));
    format.nested = cJSON_IsTrue(json_get(quantised, "bnb_4bit_use_double_quant"));
    return format;
}

// ---- which family ---------------------------------------------------------------------------------------------------
// A model of text and images whose text model is of a family. Its config is in text_config, its tensors have another
// prefix, and the file has further tensors, which are not trained here.
typedef struct {
    const char *family, *model_type, *architecture;
    const char *prefix;   // replaces the first part of names.layer_prefix in files
    const char *modules;  // prefix of module names in transformers and in adapters
    const char *others;   // prefixes of the further tensors, separated by "|"
    const char *defaults; // defaults of keys that text_config may omit, in --init's form, or NULL
    int text_loads;       // 1: transformers' AutoModelForCausalLM loads the text model alone from this folder
} HfComposite;

#define HF_IMAGES "vision_tower.|multi_modal_projector.|model.vision_tower.|model.multi_modal_projector."
#define HF_MISTRAL3                                                                                                    \
    "mistral3", "Mistral3ForConditionalGeneration", "language_model.model.", "model.language_model.", HF_IMAGES, NULL, 0
#define HF_GEMMA4                                                                                                      \
    "model.language_model.", "model.language_model.",                                                                  \
        "model.vision_tower.|model.audio_tower.|model.vision_embedder.|model.embed_vision.|model.embed_audio."
#define HF_UNIFIED "max_position_embeddings=262144,sliding_window=1024"
static const HfComposite hf_composites[] = {
    {"qwen3_5", "qwen3_5", "Qwen3_5ForConditionalGeneration", "model.language_model.", "model.language_model.",
     "mtp.|model.visual.", NULL, 1},
    {"qwen3_5_moe", "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "model.language_model.",
     "model.language_model.", "mtp.|model.visual.", NULL, 1},
    {"gemma4", "gemma4", "Gemma4ForConditionalGeneration", HF_GEMMA4, NULL, 0},
    {"gemma4", "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", HF_GEMMA4, HF_UNIFIED, 0},
    {"muse_glimmer", "muse_glimmer", "MuseGlimmerForConditionalGeneration", "model.language_model.",
     "model.language_model.", "model.vision_tower.|model.vision_adapter.|model.vision_projection.", NULL, 0},
    {"ministral3", HF_MISTRAL3},
    {"mistral", HF_MISTRAL3},
    {"gemma3", "gemma3", "Gemma3ForConditionalGeneration", "language_model.model.", "model.language_model.", HF_IMAGES,
     "vocab_size=262208,num_attention_heads=8,num_key_value_heads=4,head_dim=256", 0}};
#define HF_COMPOSITES (sizeof(hf_composites) / sizeof(hf_composites[0]))

// Another config class for text models of a family; these models lack some of the family's parts
static const struct {
    const char *family, *model_type, *architecture, *defaults; // defaults: like HfComposite.defaults
} hf_twin = {"gemma4", "gemma4_unified_text", "Gemma4UnifiedForCausalLM", HF_UNIFIED};

static int hf_is_twin(const Family *family, const cJSON *type) {
    return json_is(type, hf_twin.model_type) && !strcmp(family->name, hf_twin.family);
}

static int hf_is_type(const Family *family, const cJSON *type) {
    return json_is(type, family->model_type) || hf_is_twin(family, type);
}

static const HfComposite *hf_composite_of(const Family *family) {
    for (size_t i = 0; i < HF_COMPOSITES; i++)
        if (!strcmp(hf_composites[i].family, family->name)) return &hf_composites[i];
    return NULL;
}

// Returns the known composite model that a config.json describes, or NULL.
static const HfComposite *hf_composite(const cJSON *root) {
    const cJSON *type = json_get(root, "model_type"), *list = json_get(root, "architectures");
    const cJSON *architecture = cJSON_IsArray(list) ? list->child : list;
    const cJSON *text = json_get(json_get(root, "text_config"), "model_type");
    const HfComposite *found = NULL;
    for (const HfComposite *c = hf_composites; c < hf_composites + HF_COMPOSITES; c++) {
        if (type ? !json_is(type, c->model_type) : !json_is(architecture, c->architecture)) continue;
        if (!found) found = c;
        if (hf_is_type(family_find(c->family), text)) return c;
    }
    return found;
}

__attribute__((noreturn)) static void hf_refuse_family(const char *path, const cJSON *root, const char *key) {
    const cJSON *inner = json_get(root, "text_config"), *text = inner ? inner : root, *layer;
    const cJSON *types = json_get(text, "layer_types"), *item = json_get(root, key);
    const char *what = "";
    char value[64], known[512] = "";
    cJSON_ArrayForEach(layer, types) if (json_is(layer, "linear_attention")) what =
        ", a hybrid with layers of linear attention,";
    json_scalar_text(cJSON_IsArray(item) ? item->child : item, value, sizeof(value));
    if (strstr(value, "vision") || strstr(value, "audio")) what = ", the tower of images or sound of a model,";
    if (json_get(text, "num_experts") || json_get(text, "num_local_experts") || json_get(text, "n_routed_experts") ||
        strstr(value, "_moe"))
        what = ", a mixture of experts,";
    if (json_get(text, "index_topk")) what = ", with sparse attention to latents,";
    for (size_t i = 0; i < FAMILIES; i++)
        snprintf(known + strlen(known), sizeof(known) - strlen(known), "%s%s", i ? ", " : "", families[i].name);
    die("%s: %s %s%s is not in this version; families are %s", path, key, value, what, known);
}

// Returns the text model's part of config.json.
static const cJSON *hf_text_config(const cJSON *root, const HfComposite *composite, const char *path) {
    const cJSON *text = json_get(root, "text_config"), *type = json_get(text, "model_type");
    const Family *family = composite ? family_find(composite->family) : NULL;
    if (!family) return root;
    if (!cJSON_IsObject(text)) die("%s: text_config is missing; a %s has its text model there", path, family->name);
    if (type && !hf_is_type(family, type)) hf_refuse_family(path, text, "model_type");
    return text;
}

static const Family *hf_family(const cJSON *root, const char *path) {
    const cJSON *list = json_get(root, "architectures"), *type = json_get(root, "model_type");
    const cJSON *architecture = cJSON_IsArray(list) ? list->child : list;
    const HfComposite *composite = hf_composite(root);
    const Family *family = NULL, *by_type = composite ? family_find(composite->family) : NULL;
    if (!architecture && !type)
        die("%s: has neither architectures nor model_type, so its family is unknown; add model_type", path);
    if (architecture && architecture->next && cJSON_IsArray(list))
        die("%s: architectures names more than one class; keep one of them", path);
    for (const Family *f = families; f < families + FAMILIES; f++) {
        const int twin = !strcmp(f->name, hf_twin.family) && json_is(architecture, hf_twin.architecture);
        if (twin || json_is(architecture, f->architecture)) family = f;
        if (hf_is_type(f, type)) by_type = f;
    }
    if (composite && json_is(architecture, composite->architecture)) family = by_type;
    const cJSON *text = json_get(json_get(root, "text_config"), "model_type");
    for (const Family *f = families; f < families + FAMILIES && !(family && by_type) && !composite; f++)
        if (hf_is_type(f, text))
            die("%s: is a model of images or sound and text, which is not supported; save its text model by itself, as "
                "%s",
                path, f->architecture);
    if (type && !by_type) hf_refuse_family(path, root, "model_type");
    if (architecture && !family) hf_refuse_family(path, root, "architectures");
    if (family && by_type && family != by_type)
        die("%s: architectures says %s, but model_type says %s; correct one of the two", path, family->architecture,
            by_type->model_type);
    return family ? family : by_type;
}

// ---- the numbers ----------------------------------------------------------------------------------------------------
// Sets a key from the file's value, under its common or original name.
static void hf_set(Config *config, const char *name, const cJSON *item, const char *path) {
    const int is_bool = config_keys[config_key_find(name)].kind == KEY_BOOL;
    const int is_text = config_keys[config_key_find(name)].kind == KEY_GELU; // hf_constants has checked this text
    const char *quote = cJSON_IsString(item) ? "\"" : "";
    char value[64];
    json_scalar_text(item, value, sizeof(value));
    if (is_bool ? !cJSON_IsBool(item) : !is_text && !cJSON_IsNumber(item))
        die("%s: %s is %s%s%s%s, but must be %s", path, name, *quote ? "the text " : "", quote, value, quote,
            is_bool ? "true or false" : "a number");
    config_set(config, name, value, path, EXIT_RUNTIME);
}

// Names of the number of experts in config.json; the first name is written
static const char *const hf_expert_names[][2] = {{"num_experts", "num_local_experts"},
                                                 {"num_local_experts", "num_experts"},
                                                 {"n_routed_experts", "num_local_experts"}};

static const char *const *hf_names_of_experts(const Family *family) {
    return hf_expert_names[family_has_shared(family) ? 2 : family->names.router || family->expert_columns];
}

// Reads mlp_only_layers, a list of layers without experts.
static void hf_read_layers(Config *config, const cJSON *list, const char *path) {
    const cJSON *item;
    uint64_t l;
    if (!cJSON_IsArray(list)) die("%s: mlp_only_layers must be a list of layer numbers", path);
    cJSON_ArrayForEach(item, list) {
        if (!json_whole_number(item, &l) || l >= LAYER_TYPES_MAX)
            die("%s: mlp_only_layers has an entry that is not a layer's number below %d", path, LAYER_TYPES_MAX);
        config->mlp_only_layers[l / 8] |= (uint8_t)(1u << l % 8);
    }
}

// Reads mlp_layer_types, a list of "dense" or "sparse" for every layer.
static void hf_read_mlp_types(Config *config, const cJSON *list, const char *path) {
    const cJSON *item;
    size_t l = 0;
    if (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) != config->num_hidden_layers ||
        config->num_hidden_layers > LAYER_TYPES_MAX)
        die("%s: mlp_layer_types must be a list of num_hidden_layers, %zu, entries, at most %d", path,
            config->num_hidden_layers, LAYER_TYPES_MAX);
    memset(config->mlp_only_layers, 0, sizeof(config->mlp_only_layers));
    cJSON_ArrayForEach(item, list) {
        if (!json_is(item, "dense") && !json_is(item, "sparse"))
            die("%s: mlp_layer_types: the entry of layer %zu must be dense or sparse", path, l);
        if (json_is(item, "dense")) config->mlp_only_layers[l / 8] |= (uint8_t)(1u << l % 8);
        l++;
    }
}

// Refuses a model whose queries have no low rank: its tensors have other names.
static void hf_check_latents(const cJSON *root, const Family *family, const char *path) {
    if (family_has_key(family, "q_lora_rank") && cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "q_lora_rank")))
        die("%s: q_lora_rank is null, queries of full rank, which are not supported in %s; take a model with "
            "q_lora_rank",
            path, family->architecture);
}

// Reads the number of experts and n_shared_experts. Shared experts become one shared expert, with the sum of their
// widths.
static void hf_read_experts(Config *config, const cJSON *root, const char *path) {
    const char *const *names = hf_names_of_experts(config->family);
    const cJSON *one = json_get(root, names[0]), *other = json_get(root, names[1]);
    const cJSON *shared = json_get(root, "n_shared_experts"), *only = json_get(root, "mlp_only_layers");
    uint64_t count = 1;
    if (one && other && !cJSON_Compare(one, other, 1))
        die("%s: %s and %s are the same key, but have different values; remove one of them", path, names[0], names[1]);
    if (one || other) hf_set(config, "num_experts", one ? one : other, path);
    if (config->family->experts_beside) {
        const cJSON *own = cJSON_GetObjectItemCaseSensitive(root, "hidden_size_per_layer_input");
        if (cJSON_IsNull(own)) config->hidden_size_per_layer_input = 0;
        if (config_given(config, "final_logit_softcapping") && config->final_logit_softcapping == 0)
            die("%s: final_logit_softcapping is 0, which makes every logit 0; use null for no cap", path);
        const int on = cJSON_IsTrue(json_get(root, "enable_moe_block"));
        if (on &&
            (!config->num_experts || !json_get(root, "top_k_experts") || !json_get(root, "moe_intermediate_size")))
            die("%s: enable_moe_block is true, so num_experts, top_k_experts and moe_intermediate_size must be given",
                path);
        if (!on) config->num_experts = 0, config->num_experts_per_tok = config->moe_intermediate_size = 1;
    }
    if (only && family_has_key(config->family, "mlp_only_layers") && config->family->router == ROUTER_SOFTMAX)

        hf_read_layers(config, only, path);
    if (!family_counts_shared(config->family)) return;
    const cJSON *types = json_get(root, "mlp_layer_types");
    if (types && family_has_key(config->family, "mlp_only_layers")) hf_read_mlp_types(config, types, path);
    if (!config_given(config, "head_dim")) config->head_dim = config->hidden_size / config->num_attention_heads;
    if (shared && (!json_whole_number(shared, &count) || count > 1024))
        die("%s: n_shared_experts must be a whole number of at most 1024", path);
    config->shared_expert_intermediate_size = (size_t)count * config->moe_intermediate_size;
    config->given[config_key_find("shared_expert_intermediate_size")] = 1;
}

// Tells whether the top level of config.json may have the key. Only Gemma's first class has rope_local_base_freq there;
// other families have it in rope_parameters.
static int hf_has_key(const Family *family, const char *name) {
    return family_has_key(family, name) && (strcmp(name, "rope_local_base_freq") != 0 || family->norm_offset);
}

// Tells whether a family's config.json has a key under its alias: every key of GPT-2, one key of models with a dense
// MLP next to experts, use_bias.
static int hf_uses_alias(const Family *family, const ConfigKey *key) {
    return key->alias &&
           (family->learned_positions || (family->experts_beside && !strcmp(key->name, "num_experts_per_tok")) ||
            (family->mlp_biases_too && !strcmp(key->name, "attention_bias")));
}

// Reads a key that the family's class calls by another name. Returns 0 if it has no other name.
static int hf_read_renamed(Config *config, const ConfigKey *key, const cJSON *root, const char *path) {
    const size_t i = hf_renamed_at(config->family, key->name);
    if (i == HF_RENAMED) return 0;
    const cJSON *own = json_get(root, hf_renamed[i].name);
    const cJSON *older = hf_renamed[i].older ? json_get(root, hf_renamed[i].older) : NULL, *item = older ? older : own;
    char where[PATH_MAX + 64];
    if (!item) return 1;
    if (!cJSON_IsNumber(item)) die("%s: %s must be a number", path, item->string);
    snprintf(where, sizeof(where), "%s: %s", path, item->string);
    hf_set(config, key->name, item, where); // the class prefers the older name, too
    return 1;
}

static void hf_read_keys(Config *config, const cJSON *root, const char *path) {
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        const int aliased = hf_uses_alias(config->family, key), gpt2 = config->family->learned_positions;
        const cJSON *common = json_get(root, key->name), *original = aliased ? json_get(root, key->alias) : NULL;
        if (aliased && !gpt2) common = NULL; // the family's class ignores the common name
        if (gpt2 && text_is_one_of(key->name, "intermediate_size|rms_norm_eps"))
            common = NULL; // GPT-2 ignores these names
        if (text_is_one_of(key->name, "rope_theta|partial_rotary_factor|layer_types|pad_token_id|num_experts|"
                                      "mlp_only_layers") ||
            key->scaling)
            continue; // separate functions below read these keys
        if (family_counts_shared(config->family) && !strcmp(key->name, "shared_expert_intermediate_size")) continue;
        if (hf_read_renamed(config, key, root, path)) continue;
        if (!hf_has_key(config->family, key->name)) continue; // the family's class ignores it
        if (key->kind == KEY_GELU && common && word_index("gelu_new|gelu_pytorch_tanh", common->valuestring) < 0)
            continue; // hf_constants checks other names of the same activation
        if (common && original && !cJSON_Compare(common, original, 1))
            die("%s: %s and %s are the same key, but have different values; remove one of them", path, key->name,
                key->alias);
        if (common || original) hf_set(config, common ? key->name : key->alias, common ? common : original, path);
    }
}

// Reads pad_token_id: inputs of this token give the embedding no gradient. A negative id counts from the end, as in
// torch.
static void hf_read_pad(Config *config, const cJSON *root, const char *path, char *remark, size_t size) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, "pad_token_id"), *eos = json_get(root, "eos_token_id");
    double id = item ? item->valuedouble : NAN;
    for (size_t i = 0; !item && i < sizeof(hf_pad_tokens) / sizeof(hf_pad_tokens[0]); i++)
        if (!strcmp(config->family->name, hf_pad_tokens[i].family)) id = hf_pad_tokens[i].id;
    config->pad_token_id = NO_ROW;
    if (!family_has_key(config->family, "pad_token_id") || cJSON_IsNull(item) || (!item && isnan(id))) return;
    if (item && !cJSON_IsNumber(item)) die("%s: pad_token_id must be a number or null", path);
    const double row = id < 0 ? id + (double)config->vocab_size : id;
    if (!(row >= 0 && row < (double)config->vocab_size && row == floor(row)))
        die("%s: pad_token_id is %g%s, outside of vocab_size %zu; give an id below it, or null", path, id,
            item ? "" : " (its class's default)", config->vocab_size);
    config->pad_token_id = (size_t)row;
    const cJSON *end = cJSON_IsArray(eos) ? eos->child : eos;
    while (end && !(cJSON_IsNumber(end) && end->valuedouble == id)) end = end == eos ? NULL : end->next;
    if (end)
        snprintf(remark + strlen(remark), size - strlen(remark),
                 "%spad_token_id is eos_token_id (%.0f): its inputs give the embedding no gradient, as in transformers",
                 *remark ? "; " : "", id);
}

// Refuses a config.json that lacks numbers which every saved config.json has.
static void hf_check_required(const Config *config, const char *path) {
    const char *also = config->family->learned_positions ? "max_position_embeddings" : "intermediate_size";
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        if ((strcmp(key->name, also) != 0 || !family_has_key(config->family, also)) &&
            (strcmp(key->name, "head_dim") != 0 || config->family->qk_norm != QK_NORM_ROTATED) && // Hunyuan's class
            !text_is_one_of(key->name, "vocab_size|hidden_size|num_hidden_layers|num_attention_heads"))
            continue;
        if (config->family->bare_attention && !strcmp(key->name, "num_hidden_layers")) continue; // hf_read_branches
        const char *alias = config->family->learned_positions ? key->alias : NULL;
        if (!config_given(config, key->name))
            die("%s: %s%s%s%s is missing; add it, or download the file again", path, key->name, alias ? " (or " : "",
                alias ? alias : "", alias ? ")" : "");
    }
}

// ---- rotary positions -----------------------------------------------------------------------------------------------
#define SLIDING     "sliding_attention" // kinds of layers
#define FULL        "full_attention"
#define LINEAR      "linear_attention"
#define CONVOLUTION "conv"

// Values that the top level or an object of rotary positions may give: given in only one place, or equal in both
typedef struct {
    const cJSON *theta, *rotated; // rope_theta, partial_rotary_factor
} HfRope;

// Checks an object of rotary positions of any type: it contains no objects, and rotates whole heads if the family
// requires this. Returns the type, or NULL.
static const cJSON *hf_check_rope(const Config *config, const cJSON *rope, const char *name, const char *path) {
    char value[64];
    const cJSON *factor = json_get(rope, "partial_rotary_factor"), *item;
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(rope, "rope_type");
    if (!type) type = cJSON_GetObjectItemCaseSensitive(rope, "type");
    if (!cJSON_IsObject(rope)) die("%s: %s must be an object", path, name);
    cJSON_ArrayForEach(item, rope) {
        if (cJSON_IsNull(item) && (item == type || text_is_one_of(item->string, "rope_theta|partial_rotary_factor")))
            die("%s: %s.%s is null; give its value, or leave it out for the default", path, name, item->string);
        if (cJSON_IsObject(item) && text_is_one_of(item->string, SLIDING "|" FULL "|" LINEAR))
            die("%s: %s.%s: this family has one rope setting for all layers; give it without kinds of layers", path,
                name, item->string);
    }
    if (factor && !family_has_key(config->family, "partial_rotary_factor") &&
        !(cJSON_IsNumber(factor) && factor->valuedouble == 1))
        die("%s: %s.partial_rotary_factor is %s; only 1 is supported", path, name,
            json_scalar_text(factor, value, sizeof(value)));
    return type;
}

// Sets *found to an object's key, if present; refuses two different values.
static void hf_take_once(const cJSON **found, const cJSON *object, const char *key, const char *name,
                         const char *path) {
    const cJSON *inner = json_get(object, key);
    if (inner && *found && !cJSON_Compare(inner, *found, 1))
        die("%s: %s is given twice, with different values (the other value is in %s); remove one of the two", path, key,
            name);
    if (inner) *found = inner;
}

static void hf_read_rope_object(Config *config, const cJSON *rope, const char *name, HfRope *found, const char *path) {
    char value[64];
    const cJSON *type = hf_check_rope(config, rope, name, path);
    hf_take_once(&found->theta, rope, "rope_theta", name, path);
    const int whole = family_has_convolution(config->family) && config->family->proportional; // or default: LFM3
    if (!whole || !type || !json_is(type, "default")) // LFM3's class ignores the factor of default positions
        hf_take_once(&found->rotated, rope, "partial_rotary_factor", name, path);
    if (!type && json_get(rope, "factor"))
        die("%s: %s has a factor but no rope_type; give both or neither", path, name);
    if (!type) return;
    const int scales = family_has_key(config->family, "rope_type"), alpha = family_has_key(config->family, "alpha");
    const char *plain = whole ? "proportional|default" : config->family->proportional ? "proportional" : "default";
    if (!cJSON_IsString(type) || (!text_is_one_of(type->valuestring, scales ? "default|linear|llama3|yarn" : plain) &&
                                  !(alpha && json_is(type, "dynamic"))))
        die("%s: %s of type %s is not supported%s; supported: %s", path, name,
            json_scalar_text(type, value, sizeof(value)), scales ? "" : " for this family",
            scales ? "default, linear, llama3 or yarn" : plain);
    if (!scales) return;
    config_set(config, "rope_type", type->valuestring, path, EXIT_RUNTIME);
    for (const ConfigKey *key = config_keys; key < config_keys + CONFIG_KEYS; key++) {
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(rope, key->name);
        if (!item || key->kind == KEY_ROPE_TYPE || !(key->scaling >> config->rope.type & 1)) continue;
        if (!family_has_key(config->family, key->name)) continue;
        if (cJSON_IsNull(item) && text_is_one_of(key->name, "truncate|original_max_position_embeddings"))
            die("%s: %s.%s is null; give its value, or leave it out for the default", path, name, key->name);
        if (cJSON_IsNull(item)) continue; // null counts as absent here
        hf_set(config, key->name, item, path);
        if (!strcmp(key->name, "attention_factor") && !(item->valuedouble > 0))
            die("%s: %s.attention_factor is %g; it must be above 0", path, name, item->valuedouble);
    }
}

// Checks keys that only proportional positions have. If partial_rotary_factor is absent, all pairs of full attention
// are rotated.
static void hf_check_proportional(Config *config, const cJSON *full, const cJSON *sliding, const char *path) {
    const cJSON *factor = json_get(full, "factor");
    if (!json_get(full, "rope_type") && !json_get(full, "type"))
        die("%s: rope_parameters.full_attention has no rope_type; give proportional", path);
    if (!json_get(full, "rope_theta") || (sliding && !json_get(sliding, "rope_theta")))
        die("%s: rope_parameters must have a rope_theta for each kind of layer", path);
    if (factor && !(cJSON_IsNumber(factor) && factor->valuedouble == 1))
        die("%s: rope_parameters.full_attention.factor is not supported; this family's positions are not scaled; leave "
            "it out",
            path);
    config->partial_rotary_factor = 1;
}

// Reads Gemma's rope_parameters: one object per kind of layer.
static void hf_read_rope_per_layer(Config *config, const cJSON *rope, HfRope *found, const char *path) {
    const cJSON *full = json_get(rope, "full_attention"), *sliding = json_get(rope, "sliding_attention");
    char value[64];
    if (!cJSON_IsObject(rope)) die("%s: rope_parameters must be an object", path);
    if (cJSON_IsFalse(json_get(rope, "truncate")) || cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(rope, "truncate")))
        die("%s: rope_parameters.truncate must not be false or null for all kinds of layers; leave it out", path);
    if (!full && !sliding)
        die("%s: rope_parameters must have full_attention or sliding_attention for this family", path);
    if (config->family->proportional) hf_check_proportional(config, full, sliding, path);
    if (full) hf_read_rope_object(config, full, "rope_parameters.full_attention", found, path);
    if (!sliding) return;
    const cJSON *type = hf_check_rope(config, sliding, "rope_parameters.sliding_attention", path);
    const cJSON *local = json_get(sliding, "rope_theta");
    if (type && !json_is(type, "default"))
        die("%s: rope_parameters.sliding_attention of type %s is not supported; layers with a window must have type "
            "default",
            path, json_scalar_text(type, value, sizeof(value)));
    if (local) hf_set(config, "rope_local_base_freq", local, path);
}

// Checks the keys by which Ministral scales queries; transformers requires both: the factor, and the position from
// which it applies.
static void hf_check_growth(const Config *config, const cJSON *rope, const char *path) {
    const cJSON *growth = json_get(rope, "llama_4_scaling_beta"),
                *from = json_get(rope, "original_max_position_embeddings");
    if (!cJSON_IsNumber(growth) || !cJSON_IsNumber(from))
        die("%s: rope_parameters has no %s; add it, since %s needs it", path,
            growth ? "original_max_position_embeddings" : "llama_4_scaling_beta", config->family->architecture);
    if (growth->valuedouble != 0 && config->rope.type != ROPE_YARN && config->rope.type != ROPE_LLAMA3)
        die("%s: llama_4_scaling_beta is %g with rope_type %s; it is supported with yarn and llama3, or as 0", path,
            growth->valuedouble, rope_type_names[config->rope.type]);
}

// Refuses a key of rope_parameters that changes the model but that transformers ignores if there is also rope_scaling.
static void hf_check_hidden(const cJSON *parameters, const char *key, double value, const char *path) {
    const cJSON *hidden = json_get(parameters, key);
    if (hidden && hidden->valuedouble != value)
        die("%s: transformers ignores rope_parameters if rope_scaling is given: %s would be %g, not %g; give it in "
            "rope_scaling",
            path, key, value, hidden->valuedouble);
}

// Reads rope_scaling (classic) or rope_parameters (transformers 5). If both exist, rope_scaling counts, as in
// transformers.
static void hf_read_rope(Config *config, const cJSON *root, const char *path) {
    const cJSON *scaling = json_get(root, "rope_scaling");
    HfRope found = {json_get(root, "rope_theta"), json_get(root, "partial_rotary_factor")};
    const cJSON *parameters = json_get(root, "rope_parameters"),
                *original = cJSON_GetObjectItemCaseSensitive(root, "original_max_position_embeddings");
    const int per_layer = family_has_key(config->family, "rope_local_base_freq");
    const int hides = !per_layer && scaling && (scaling->child || !cJSON_IsObject(scaling));
    const int given = parameters || hides, grows = given && family_has_key(config->family, "llama_4_scaling_beta");
    if (given && family_names_key(config->family, "rope_type")) config->rope = rope_unscaled;
    if (grows) config->rope_theta = HF_THETA; // Ministral's class has it in rope_parameters
    if (parameters && per_layer)
        hf_read_rope_per_layer(config, parameters, &found, path);
    else if (parameters && !hides)
        hf_read_rope_object(config, parameters, "rope_parameters", &found, path);
    const cJSON *type = json_get(scaling, "type");
    const int plain = config->rope.type == ROPE_DEFAULT && json_is(type, "default");
    if (per_layer && type && !plain && !json_get(scaling, "rope_type"))
        die("%s: rope_scaling has a type but no rope_type, which %s needs; rename type to rope_type", path,
            config->family->architecture);
    if (scaling && (per_layer || hides)) hf_read_rope_object(config, scaling, "rope_scaling", &found, path);
    if (found.theta && !grows && config->rope.llama_4_scaling_beta != 0 &&
        found.theta->valuedouble != config->rope_theta)
        die("%s: transformers ignores rope_theta without rope_parameters; give it in rope_parameters", path);
    if (found.theta) hf_set(config, "rope_theta", found.theta, path);
    if (found.rotated && family_has_key(config->family, "partial_rotary_factor"))
        hf_set(config, "partial_rotary_factor", found.rotated, path);
    if (!found.theta && cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "rope_theta")))
        die("%s: rope_theta is null; give its value, or leave it out for the default", path);
    if (hides) hf_check_hidden(parameters, "rope_theta", config->rope_theta, path);
    if (hides) hf_check_hidden(parameters, "partial_rotary_factor", config->partial_rotary_factor, path);
    if (grows) hf_check_growth(config, hides ? scaling : parameters, path);
    if (original && !per_layer && config->rope.type != ROPE_DEFAULT && config->rope.type != ROPE_LINEAR)
        hf_set(config, "original_max_position_embeddings", original, path);
}

// ---- the layers' kinds ----------------------------------------------------------------------------------------------
// Defaults in transformers
#define HF_WINDOW               4096 // sliding_window of Qwen and Gemma
#define QWEN_FIRST_WINDOW_LAYER 28   // max_window_layers: layers from here on have a window

// Returns a whole number of config.json; `otherwise` if it is absent.
static size_t hf_size(const cJSON *root, const char *key, size_t otherwise, const char *path) {
    const cJSON *item = json_get(root, key);
    uint64_t value = otherwise;
    if (item && !json_whole_number(item, &value)) die("%s: %s must be a whole number of at least 0", path, key);
    return (size_t)value;
}

// Reads layer_types, a list of every layer's kind.
static void hf_read_layer_types(Config *config, const cJSON *types, const char *path) {
    const cJSON *type;
    const char *known = family_has_linear(config->family)            ? FULL "|" LINEAR
                        : !strcmp(config->family->layer_types, "sc") ? FULL "|" SLIDING "|" CONVOLUTION
                        : family_has_convolution(config->family)     ? FULL "|" CONVOLUTION
                        : *config->family->layer_types == 's'        ? FULL "|" SLIDING
                                                                     : FULL;
    size_t layers = 0;
    char value[64];
    if (!cJSON_IsArray(types)) die("%s: layer_types must be a list", path);
    memset(config->layer_types, 0, sizeof(config->layer_types));
    cJSON_ArrayForEach(type, types) {
        if (!cJSON_IsString(type) || !text_is_one_of(type->valuestring, known))
            die("%s: layer_types: layer %zu is %s, but must be %s", path, layers,
                json_scalar_text(type, value, sizeof(value)), known);
        if (layers < LAYER_TYPES_MAX) config->layer_types[layers] = type->valuestring[0];
        layers++;
    }
    if (layers != config->num_hidden_layers)
        die("%s: layer_types names %zu layers, but num_hidden_layers is %zu; make the two equal", path, layers,
            config->num_hidden_layers);
    if (layers > LAYER_TYPES_MAX) die("%s: layer_types has more layers than the supported %d", path, LAYER_TYPES_MAX);
}

// Sets layer_types to the class's default pattern ("lllf"), but with `interval` layers in it: the last layer of an
// interval has the other kind.
static void hf_repeat_types(Config *config, const char *key, size_t interval, const char *path) {
    const char usual = config->layer_types[0], last = config->layer_types[strlen(config->layer_types) - 1];
    const size_t period = min_size(interval, config->num_hidden_layers);
    if (!interval) die("%s: %s is 0; it must be at least 1", path, key);
    if (period > LAYER_TYPES_MAX) die("%s: %s is %zu; at most %d is supported", path, key, interval, LAYER_TYPES_MAX);
    memset(config->layer_types, 0, sizeof(config->layer_types));
    for (size_t l = 0; l < period; l++) config->layer_types[l] = (l + 1) % interval ? usual : last;
}

// Tells whether OLMo's class has no rotary positions: rope_theta is null, in the object of positions or else outside.
static int hf_has_no_rope(const Family *family, const cJSON *root) {
    const cJSON *rope = json_get(root, "rope_scaling");
    if (!rope || !rope->child) rope = json_get(root, "rope_parameters");
    const cJSON *inner = cJSON_GetObjectItemCaseSensitive(rope, "rope_theta");
    return !strcmp(family->layer_types, "ln") &&
           cJSON_IsNull(inner ? inner : cJSON_GetObjectItemCaseSensitive(root, "rope_theta"));
}

// Reads which layers have linear attention: a list, or all except every full_attention_interval-th, a key that OLMo's
// class lacks.
static void hf_read_kinds(Config *config, const cJSON *root, const char *path) {
    const cJSON *types = json_get(root, "layer_types");
    const size_t usual = strlen(config->layer_types), L = config->num_hidden_layers;
    const int olmo = config->family->linear_pre_norms;
    if (types)
        hf_read_layer_types(config, types, path);
    else
        hf_repeat_types(config, "full_attention_interval",
                        olmo ? min_size(usual, L) : hf_size(root, "full_attention_interval", usual, path), path);
    if (olmo) config->given[config_key_find("layer_types")] = 1;
    for (char *at = config->layer_types; hf_has_no_rope(config->family, root) && *at; at++)
        if (*at == 'f') *at = 'n';
}

// Reads the branch of each layer: a list under one of two names, or a pattern. Its length is the number of layers.
static void hf_read_branches(Config *config, const cJSON *root, const char *path) {
    static const char *const names[] = {LINEAR, "mamba", FULL, "attention", "mlp", "moe"}, letters[] = "LLFFpe";
    const cJSON *list = json_get(root, "layers_block_type"), *pattern = json_get(root, "hybrid_override_pattern"),
                *type;
    const char *marks = "M*-E", *text = cJSON_IsString(pattern) ? pattern->valuestring : "";
    size_t layers = 0;
    if (!list) list = json_get(root, "layer_types");
    if (!config->family->bare_attention || (!list && !pattern)) return;
    memset(config->layer_types, 0, sizeof(config->layer_types));
    cJSON_ArrayForEach(type, list) {
        size_t i = 0;
        while (i < sizeof(names) / sizeof(names[0]) && !json_is(type, names[i])) i++;
        if (i == sizeof(names) / sizeof(names[0]) || layers == LAYER_TYPES_MAX)
            die("%s: layers_block_type: layer %zu must be " LINEAR ", " FULL ", mlp or moe, and at most %d layers are "
                "supported",
                path, layers, LAYER_TYPES_MAX);
        config->layer_types[layers++] = letters[i];
    }
    for (; !list && *text; text++) {
        const char *mark = strchr(marks, *text);
        if (!mark || layers == LAYER_TYPES_MAX)
            die("%s: hybrid_override_pattern: layer %zu must be M, *, - or E, and at most %d layers are supported",
                path, layers, LAYER_TYPES_MAX);
        config->layer_types[layers++] = "LFpe"[mark - marks];
    }
    if (!layers) die("%s: names no layers; give layers_block_type", path);
    config->num_hidden_layers = layers;
}

// Reads which layers have no rotary positions: a list of 0 and 1 for at least all layers, or every
// no_rope_layer_interval-th.
static void hf_read_no_rope(Config *config, const cJSON *root, const char *path) {
    const cJSON *list = json_get(root, "no_rope_layers"), *types = json_get(root, "layer_types");
    const size_t interval = hf_size(root, "no_rope_layer_interval", strlen(config->layer_types), path);
    const size_t L = config->num_hidden_layers;
    Config ignored = *config;
    if (L > LAYER_TYPES_MAX) die("%s: has more layers than the %d that this family supports", path, LAYER_TYPES_MAX);
    if (types) hf_read_layer_types(&ignored, types, path);
    if (list && (!cJSON_IsArray(list) || (size_t)cJSON_GetArraySize(list) < L))
        die("%s: no_rope_layers must be a list of 0 or 1 for each of %zu layers", path, L);
    if (!list) hf_repeat_types(config, "no_rope_layer_interval", interval, path);
    const cJSON *item = list ? list->child : NULL;
    for (size_t l = 0; item && l < L; l++, item = item->next) {
        if (!cJSON_IsNumber(item) || (item->valuedouble != 0 && item->valuedouble != 1))
            die("%s: no_rope_layers: the value of layer %zu must be 0 or 1", path, l);
        config->layer_types[l] = item->valuedouble != 0 ? 'f' : 'n';
    }
    config->layer_types[L] = 0;
}

// Reads which layers have a window (layer_types) and which have no rotary positions (layer_rope_theta is 0), of a class
// whose defaults count every fourth layer from the last. transformers reads the other values of the list as yes or no.
static void hf_read_rope_thetas(Config *config, const cJSON *root, const char *path) {
    const cJSON *types = json_get(root, "layer_types"), *thetas = json_get(root, "layer_rope_theta"), *item;
    const size_t L = config->num_hidden_layers;
    if (L > LAYER_TYPES_MAX) die("%s: has more layers than the %d that this family supports", path, LAYER_TYPES_MAX);
    if (thetas && (!cJSON_IsArray(thetas) || (size_t)cJSON_GetArraySize(thetas) < L))
        die("%s: layer_rope_theta must be a list of a number for each of %zu layers", path, L);
    if (types) hf_read_layer_types(config, types, path);
    for (size_t l = 0; l < L; l++) {
        const int fourth = (L - 1 - l) % 4 == 0;
        if (!types) config->layer_types[l] = fourth ? 'f' : 's';
        item = thetas ? cJSON_GetArrayItem(thetas, (int)l) : NULL;
        if (item && (!cJSON_IsNumber(item) || (item->valuedouble != 0 && item->valuedouble != config->rope_theta)))
            die("%s: layer_rope_theta: the value of layer %zu must be 0 or rope_theta, %g", path, l,
                config->rope_theta);
        if (item ? item->valuedouble != 0 : !fourth) continue;
        if (config->layer_types[l] == 's')
            die("%s: layer_rope_theta: layer %zu has a sliding window, so it must have rotary positions here", path, l);
        config->layer_types[l] = 'n';
    }
    config->layer_types[L] = 0, config->given[config_key_find("layer_types")] = 1;
    if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "sliding_window"))) config->sliding_window = 0;
    if (strchr(config->layer_types, 's') && !config->sliding_window)
        die("%s: layer_types has sliding_attention, but there is no sliding_window; give its size", path);
}

// Reads sliding_window and which layers have a window, by the rules of each class. A window includes the key of the
// query's token, as it does in our config.
static void hf_read_windows(Config *config, const cJSON *root, const char *path) {
    const Family *family = config->family;
    const cJSON *types = json_get(root, "layer_types"),
                *window = cJSON_GetObjectItemCaseSensitive(root, "sliding_window");
    const int has = family_has_key(family, "sliding_window"), qwen = has && !config->layer_types[0];
    const int everywhere = family->same_windows;
    const int turned_off = qwen && !cJSON_IsTrue(json_get(root, "use_sliding_window"));
    size_t l, L = config->num_hidden_layers;
    if ((everywhere || qwen) && !turned_off && cJSON_IsNumber(window) && window->valuedouble == 0)
        die("%s: sliding_window 0 would mask every token; use null for no window", path);
    if (qwen && !window) config->sliding_window = HF_WINDOW;
    if (turned_off || (has && cJSON_IsNull(window))) config->sliding_window = 0;
    if (L > LAYER_TYPES_MAX && config->sliding_window && !everywhere)
        die("%s: sliding_window is supported in models of at most %d layers", path, LAYER_TYPES_MAX);
    if (types) {
        hf_read_layer_types(config, types, path);
        if (everywhere && config->sliding_window && strchr(config->layer_types, 'f'))
            die("%s: layer_types has full_attention, but %s gives every layer the sliding_window; make all "
                "sliding_attention, or set sliding_window to null",
                path, family->architecture);
        if (strchr(config->layer_types, 's') && !config->sliding_window)
            die("%s: layer_types has sliding_attention, but there is no sliding_window%s; give its size", path,
                qwen ? " (or use_sliding_window is false)" : "");
    } else if (qwen && config->sliding_window) {
        size_t first = hf_size(root, "max_window_layers", QWEN_FIRST_WINDOW_LAYER, path);
        for (l = 0; l < L; l++) config->layer_types[l] = l >= first ? 's' : 'f';
    } else if (has && !everywhere && !qwen) {
        size_t pattern = strlen(config->layer_types); // default of the class: the last layer of a period has no window
        // Only Gemma has the key sliding_window_pattern.
        if (family->norm_offset) pattern = hf_size(root, "sliding_window_pattern", pattern, path);
        hf_repeat_types(config, "sliding_window_pattern", pattern, path);
        if (!config->sliding_window && strchr(config->layer_types, 's'))
            die("%s: sliding_window is null, but layers have sliding attention; give its size", path);
    }
}

// Reads which layers have a short convolution: a list of kinds, or the numbers of all layers with attention.
static void hf_read_convolutions(Config *config, const cJSON *root, const char *path) {
    const cJSON *types = json_get(root, "layer_types"), *list = json_get(root, "full_attn_idxs"), *item;
    const size_t L = config->num_hidden_layers;
    uint64_t l;
    if (*config->family->layer_types == 's' && json_get(root, "rms_norm_eps")) // its class has both names
        die("%s: rms_norm_eps is another name of norm_eps here; give norm_eps alone", path);
    if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "sliding_window"))) config->sliding_window = 0;
    if (types) hf_read_layer_types(config, types, path), config->given[config_key_find("layer_types")] = 1;
    if (strchr(config->layer_types, 's') && !config->sliding_window)
        die("%s: layer_types has sliding_attention, but there is no sliding_window; give its size", path);
    if (!types && config->family->router) die("%s: layer_types is missing; name the kind of each layer", path);
    if (types || !list || *config->family->layer_types == 's') return;
    if (!cJSON_IsArray(list)) die("%s: full_attn_idxs must be a list of layer numbers", path);
    if (L > LAYER_TYPES_MAX) die("%s: has more layers than the %d that this family supports", path, LAYER_TYPES_MAX);
    memset(config->layer_types, 'c', L);
    config->layer_types[L] = 0;
    cJSON_ArrayForEach(item, list) {
        if (!json_whole_number(item, &l)) die("%s: full_attn_idxs has an entry that is not a layer's number", path);
        if (l < L) config->layer_types[l] = 'f';
    }
}

// Reads LFM2's names of common keys, and the width of the MLP. Unless block_auto_adjust_ff_dim is false, the class
// takes two thirds of it, times a factor, rounded up to a multiple.
static void hf_read_blocks(Config *config, const cJSON *root, const char *path) {
    const cJSON *tied = json_get(root, "tie_embedding"), *width = json_get(root, "block_ff_dim");
    const cJSON *adjust = json_get(root, "block_auto_adjust_ff_dim"), *by = json_get(root, "block_ffn_dim_multiplier");
    const size_t multiple = hf_size(root, "block_multiple_of", 256, path);
    if (tied) hf_set(config, "tie_word_embeddings", tied, path);
    if (config->family->router) return;
    if (width) hf_set(config, "intermediate_size", width, path);
    if (!config_given(config, "intermediate_size") || cJSON_IsFalse(adjust)) return;
    if (adjust && !cJSON_IsTrue(adjust)) die("%s: block_auto_adjust_ff_dim must be true or false", path);
    if (!multiple || (by && !(cJSON_IsNumber(by) && by->valuedouble > 0 && by->valuedouble < 1e6)))
        die("%s: block_multiple_of and block_ffn_dim_multiplier must be numbers above 0", path);
    const double two_thirds = floor(2 * (double)config->intermediate_size / 3);
    const size_t wide = (size_t)((by ? by->valuedouble : 1) * two_thirds);
    config->intermediate_size = (wide + multiple - 1) / multiple * multiple;
}

// Returns a layer's entry of per_layer_config. The keys of per_layer_config are layer numbers with leading zeros.
static const cJSON *hf_layer_entry(const cJSON *layers, size_t l) {
    const cJSON *item;
    cJSON_ArrayForEach(item, layers) if (strspn(item->string, "0123456789") == strlen(item->string) &&
                                         strtoul(item->string, NULL, 10) == l) return item;
    return NULL;
}

// Reads the head size and count of full attention as transformers 5.24 saves them: an object for each layer that
// differs from the other layers.
static void hf_read_layer_heads(Config *config, const cJSON *root, const char *path) {
    const cJSON *layers = cJSON_GetObjectItemCaseSensitive(root, "per_layer_config"), *key;
    const size_t L = config->num_hidden_layers;
    size_t entries = 0, heads[2][2] = {{0, 0}, {config->head_dim, config->num_key_value_heads}}; // heads[has a window]
    if (!layers || !family_has_key(config->family, "global_head_dim")) return;
    if (!cJSON_IsObject(layers)) die("%s: per_layer_config must be an object", path);
    for (size_t l = 0; l < L; l++) {
        const cJSON *entry = hf_layer_entry(layers, l);
        const int window = layer_letter(config, l) == 's' && l + 1 < L;
        const size_t dim = hf_size(entry, "head_dim", config->head_dim, path);
        const size_t kv = hf_size(entry, "num_key_value_heads", config->num_key_value_heads, path);
        entries += entry != NULL;
        cJSON_ArrayForEach(key, entry) if (!text_is_one_of(key->string, "head_dim|num_key_value_heads"))
            die("%s: per_layer_config: layer %zu has %s, but may have only head_dim and num_key_value_heads", path, l,
                key->string);
        if (!heads[window][0]) heads[window][0] = dim, heads[window][1] = kv;
        if (dim != heads[window][0] || kv != heads[window][1])
            die("%s: per_layer_config: layer %zu needs the head_dim and num_key_value_heads of the other layers with "
                "%s attention",
                path, l, window ? "sliding" : "full");
    }
    if (entries != (size_t)cJSON_GetArraySize(layers))
        die("%s: per_layer_config has a key that is not a layer number below %zu", path, L);
    if (heads[0][1] != config->num_key_value_heads && !config->attention_k_eq_v)
        die("%s: per_layer_config: %zu num_key_value_heads in full attention, %zu else, are supported only with "
            "attention_k_eq_v",
            path, heads[0][1], config->num_key_value_heads);
    config->global_head_dim = heads[0][0], config->num_global_key_value_heads = heads[0][1];
}

// ---- reading --------------------------------------------------------------------------------------------------------
// Reads tie_word_embeddings of a composite model from the outer object; a value in text_config must agree.
static void hf_read_tied(Config *config, const cJSON *whole, const cJSON *text, const char *path) {
    const cJSON *outer = json_get(whole, "tie_word_embeddings"), *inner = json_get(text, "tie_word_embeddings");
    if (outer && inner && !cJSON_Compare(outer, inner, 1))
        die("%s: tie_word_embeddings has one value at the top level and another in text_config; set both to true if "
            "the head shares the embedding's weights, else to false",
            path);
    if (outer) hf_set(config, "tie_word_embeddings", outer, path);
}

// Fills keys missing from text_config with transformers' class defaults.
static void hf_read_defaults(Config *config, const char *defaults, const char *path) {
    char name[64], value[64];
    for (int n; defaults && sscanf(defaults, "%63[^=]=%63[^,]%n", name, value, &n) == 2; defaults += n + !!defaults[n])
        if (!config_given(config, name)) config_set(config, name, value, path, EXIT_RUNTIME);
}

// Reads and checks config.json. `remark`: receives a line for users who train the model, or ""
static Config hf_config_read(const char *path, char *remark, size_t remark_size) {
    cJSON *whole = json_read_object(path, HF_CONFIG_MAX);
    const Family *family = hf_family(whole, path);
    const cJSON *root = hf_text_config(whole, hf_composite(whole), path);
    Config config = config_defaults(family);
    hf_check_latents(root, family, path);
    hf_check_nulls(root, family, path);
    hf_config_quantised(whole, path), hf_config_quantised(root, path);
    hf_check_constants(root, family, path, remark, remark_size);
    hf_read_keys(&config, root, path);
    if (family->router) hf_read_experts(&config, root, path);
    if (text_is_one_of(family->name, "lfm2|lfm2_moe")) hf_read_blocks(&config, root, path);
    if (root != whole) hf_read_defaults(&config, hf_composite(whole)->defaults, path);
    if (hf_is_twin(family, json_get(root, "model_type"))) {
        hf_read_defaults(&config, hf_twin.defaults, path);
        config.num_experts = config.hidden_size_per_layer_input = 0; // the class of this model_type has neither key
    }
    if (root != whole) hf_read_tied(&config, whole, root, path);
    hf_read_branches(&config, root, path);
    hf_check_required(&config, path);
    if (!family->learned_positions && !hf_has_no_rope(family, root) && !family->bare_attention)
        hf_read_rope(&config, root, path);
    if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(root, "num_key_value_heads")))
        config.num_key_value_heads = config.num_attention_heads; // null, unlike an absent key, means one per query head
    if (family_has_linear(family) && !family->bare_attention)
        hf_read_kinds(&config, root, path);
    else if (family_has_convolution(family))
        hf_read_convolutions(&config, root, path);
    else if (family->bare_attention)
        config.sliding_window = 0; // its class has the key, but no windows
    else if (*family->layer_types == 'n')
        hf_read_no_rope(&config, root, path);
    else if (!strcmp(family->layer_types, "sn"))
        hf_read_rope_thetas(&config, root, path);
    else
        hf_read_windows(&config, root, path);
    hf_read_layer_heads(&config, root, path);
    hf_read_pad(&config, root, path, remark, remark_size);
    config_finish(&config, path, EXIT_RUNTIME);
    cJSON_Delete(whole);
    return config;
}

#endif
