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
#include "hf_layers.h"
#include "llmc/base/dtype.h"
#include "llmc/base/file.h"

#define HF_CONFIG_MAX ((size_t)16 << 20) // most bytes read of a config.json or an index

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
    {"mistral4", HF_MISTRAL3},
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

// Tells whether a model_type is of a family, or of a class that another program defines as the family's.
static int hf_is_type(const Family *family, const cJSON *type) {
    return json_is(type, family->model_type) || hf_is_twin(family, type) ||
           (json_is(type, "kimi_k2") && !strcmp(family->name, "deepseek_v3"));
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
    hf_check_nulls(root, family, path);
    hf_config_quantised(whole, path), hf_config_quantised(root, path);
    hf_check_constants(root, family, path, remark, remark_size);
    hf_read_keys(&config, root, path);
    hf_read_latents(&config, root, path);
    if (family->router) hf_read_experts(&config, root, path);
    if (text_is_one_of(family->name, "lfm2|lfm2_moe")) hf_read_blocks(&config, root, path);
    if (root != whole) hf_read_defaults(&config, hf_composite(whole)->defaults, path);
    if (hf_is_twin(family, json_get(root, "model_type"))) {
        hf_read_defaults(&config, hf_twin.defaults, path);
        config.num_experts = config.hidden_size_per_layer_input = 0; // the class of this model_type has neither key
    }
    if (root != whole) hf_read_tied(&config, whole, root, path);
    hf_read_branches(&config, root, path);
    if (family_expands(family)) hf_read_mamba(&config, root, path);
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
