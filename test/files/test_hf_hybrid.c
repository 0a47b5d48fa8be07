/*
Folders of hybrid models (qwen3_5), from the hub and of the text model alone: config.json, read or refused by name;
tensors under the names of either; convolutions in files. Folders of other families' text models beside images.
*/
#include "convert_files.h"

#define HYBRID                                                                                                         \
    "qwen3_5,vocab_size=37,hidden_size=24,intermediate_size=20,num_hidden_layers=5,num_attention_heads=4,"             \
    "num_key_value_heads=2,head_dim=16,max_position_embeddings=128,rope_theta=1000000,linear_num_key_heads=2,"         \
    "linear_num_value_heads=6,linear_key_head_dim=8,linear_value_head_dim=4"
#define TEXT_KEYS                                                                                                      \
    "\"model_type\": \"qwen3_5_text\", \"vocab_size\": 37, \"hidden_size\": 24, \"intermediate_size\": 20, "           \
    "\"num_hidden_layers\": 5, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 16, "             \
    "\"max_position_embeddings\": 128, \"rms_norm_eps\": 1e-06, \"hidden_act\": \"silu\", "                            \
    "\"attention_bias\": false, \"attn_output_gate\": true, \"full_attention_interval\": 4, "                          \
    "\"linear_conv_kernel_dim\": 4, \"linear_num_key_heads\": 2, \"linear_num_value_heads\": 6, "                      \
    "\"linear_key_head_dim\": 8, \"linear_value_head_dim\": 4, \"mamba_ssm_dtype\": \"float32\", "                     \
    "\"mtp_num_hidden_layers\": 1, \"rope_parameters\": {\"mrope_interleaved\": true, \"mrope_section\": [1, 1, 0], "  \
    "\"rope_type\": \"default\", \"rope_theta\": 1000000, \"partial_rotary_factor\": 0.25}, \"dtype\": \"float32\""
#define TEXT_JSON "{\"architectures\": [\"Qwen3_5ForCausalLM\"], " TEXT_KEYS ", \"tie_word_embeddings\": false}\n"
#define HUB_JSON                                                                                                       \
    "{\n  \"architectures\": [\"Qwen3_5ForConditionalGeneration\"], \"model_type\": \"qwen3_5\",\n"                    \
    "  \"text_config\": {" TEXT_KEYS ", \"tie_word_embeddings\": false},\n  \"tie_word_embeddings\": false,\n"         \
    "  \"vision_config\": {\"model_type\": \"qwen3_5\", \"hidden_size\": 8, \"dtype\": \"float32\"},\n"                \
    "  \"language_model_only\": false, \"dtype\": \"float32\"\n}\n"

// Returns a path in the scratch folder that lasts until the next case. new_place: also clears it.
static const char *lasting(const char *name) {
    const char *path = scratch_path(name);
    return strcpy((char *)case_memory(strlen(path) + 1), path);
}

static const char *new_place(const char *name) {
    fresh_place(name);
    return lasting(name);
}

// ---- config.json ----------------------------------------------------------------------------------------------------
static const char *config_of(const char *json) {
    static char text[4096];
    char remark[256];
    write_file(scratch_path("config.json"), json, strlen(json));
    const Config config = hf_config_read(scratch_path("config.json"), remark, sizeof(remark));
    config_to_text(&config, text, sizeof(text));
    assert_string_equal(remark, "");
    return text;
}

// Returns a changed copy of a text.
static char *changed_json(const char *json, const char *find, const char *replace) {
    const Damage change = CHANGED_TEXT("", find, replace, NULL);
    size_t count = strlen(json);
    char *copy = damaged_copy(&change, json, &count);
    copy[count] = 0;
    return copy;
}

// The text model's config with one key changed, in either folder, equals HYBRID with the expected keys.
TEST(configs_that_are_read) {
    static const struct {
        const char *find, *replace, *expected; // keys after HYBRID
    } cases[] = {
        {"{", "{", ""},
        {"\"full_attention_interval\": 4", "\"full_attention_interval\": 2", ",layer_types=lf"},
        {"\"full_attention_interval\": 4", "\"full_attention_interval\": 1", ",layer_types=f"},
        {"\"full_attention_interval\": 4", "\"full_attention_interval\": 9", ",layer_types=l"},
        {"\"full_attention_interval\": 4, ", "", ""},
        {"\"full_attention_interval\": 4",
         "\"full_attention_interval\": 2, \"layer_types\": [\"full_attention\", \"linear_attention\", "
         "\"linear_attention\", \"linear_attention\", \"full_attention\"]",
         ",layer_types=flll"},
        {", \"partial_rotary_factor\": 0.25", "", ""},
        {"\"head_dim\": 16", "\"head_dim\": 16, \"partial_rotary_factor\": 0.25", ""},
        {"\"partial_rotary_factor\": 0.25", "\"partial_rotary_factor\": 0.5", ",partial_rotary_factor=0.5"},
        {", \"partial_rotary_factor\": 0.25}", "}, \"partial_rotary_factor\": 1.0", ",partial_rotary_factor=1"},
        {"\"rope_type\": \"default\"", "\"rope_type\": \"yarn\", \"factor\": 4", ",rope_type=yarn,factor=4"},
        {"\"attention_bias\": false", "\"attention_bias\": true, \"output_gate_type\": \"swish\"",
         ",attention_bias=true"},
        {"\"linear_conv_kernel_dim\": 4, ", "", ""},
        {"\"linear_conv_kernel_dim\": 4", "\"linear_conv_kernel_dim\": 2", ",linear_conv_kernel_dim=2"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char text[512], expected[4096];
        snprintf(text, sizeof(text), HYBRID "%s", cases[i].expected);
        const Config config = config_from_text(text, "test", EXIT_USAGE);
        config_to_text(&config, expected, sizeof(expected));
        for (int hub = 0; hub < 2; hub++) {
            char *json = changed_json(hub ? HUB_JSON : TEXT_JSON, cases[i].find, cases[i].replace);
            test_case("row %zu, %s", i, hub ? "of the hub" : "text alone");
            assert_string_equal(config_of(json), expected);
            free(json);
        }
    }
}

// Either of two keys ties the head; if both are there they agree. The architecture may be missing.
TEST(what_the_outer_object_says) {
    char *json = changed_json(HUB_JSON, ", \"tie_word_embeddings\": false", "");
    char *tied = changed_json(json, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": true");
    char *bare = changed_json(HUB_JSON, "\"architectures\": [\"Qwen3_5ForConditionalGeneration\"], ", "");
    assert_non_null(strstr(config_of(json), "tie_word_embeddings=false"));
    assert_non_null(strstr(config_of(tied), "tie_word_embeddings=true"));
    assert_non_null(strstr(config_of(bare), "qwen3_5,"));
    free(json), free(tied), free(bare);
}

// A text_config that is a whole config.json, without an architecture, is read as within the composite model.
TEST(a_text_config_alone) {
    char *whole = read_in(GOLDEN "muse_glimmer", "config.json", NULL), *within = checked_strdup(config_of(whole));
    cJSON *root = cJSON_Parse(whole);
    char *text = cJSON_Print(json_get(root, "text_config"));
    assert_string_equal(config_of(text), within);
    free(text), free(within), cJSON_Delete(root);
}

static void read_config(const void *folder) {
    char remark[256];
    hf_directory_config((const char *)folder, remark, sizeof(remark));
}

static const char *hub_folder(void) {
    const char *folder = new_place("hub");
    run_command("mkdir '%s'", folder, "");
    char path[PATH_MAX];
    path_join(path, folder, "config.json");
    write_file(path, HUB_JSON, strlen(HUB_JSON));
    return folder;
}

TEST(configs_that_are_refused) {
#define CHANGED(find, replace, words) CHANGED_TEXT("config.json", find, replace, words)
#define KEY(key, was, is, words)      CHANGED("\"" key "\": " was, "\"" key "\": " is, words)
    static const Damage rows[] = {
        CHANGED("{", "{", NULL),
        WHOLE_TEXT("config.json",
                   "{\"model_type\":\"qwen3_5_moe\",\"text_config\":{\"model_type\":\"qwen3_5_moe_text\"}}",
                   "vocab_size is missing"),
        WHOLE_TEXT("config.json", "{\"model_type\":\"qwen4_next\",\"num_experts\":8}",
                   "model_type qwen4_next, a mixture of experts, is not in this version"),
        WHOLE_TEXT("config.json", "{\"model_type\":\"qwen3_5_vision\",\"depth\":12}",
                   "model_type qwen3_5_vision, the tower of images or sound of a model, is not in this version"),
        KEY("model_type", "\"qwen3_5_text\"", "\"qwen3_5_moe_text\"", "model_type qwen3_5_moe_text, a mixture of exp"),
        CHANGED("Qwen3_5ForConditionalGeneration", "Qwen3_5ForSequenceClassification",
                "architectures Qwen3_5ForSequenceClassification is not in this version"),
        KEY("text_config", "{", "7, \"was\": {", "text_config is missing; a qwen3_5 has its text model there"),
        CHANGED("  \"tie_word_embeddings\": false", "  \"tie_word_embeddings\": true",
                "tie_word_embeddings has one value at the top level and another in text_config"),
        CHANGED("  \"language_model_only\": false", "  \"quantization_config\": {\"quant_method\": \"awq\"}",
                "quantization_config (awq): only FP8, 4 bits of bitsandbytes, and mxfp4"),
        KEY("attn_output_gate", "true", "false", "attn_output_gate is false; it must be true"),
        KEY("attn_output_gate", "true", "true, \"output_gate_type\": \"sigmoid\"",
            "output_gate_type is sigmoid; it must be"),
        KEY("hidden_act", "\"silu\"", "\"gelu\"", "hidden_act is gelu"),
        KEY("full_attention_interval", "4", "0", "full_attention_interval is 0"),
        KEY("full_attention_interval", "4", "4, \"layer_types\": [\"sliding_attention\"]",
            "layer 0 is sliding_attention, but must be full_attention|linear_attention"),
        KEY("full_attention_interval", "4", "4, \"layer_types\": [\"linear_attention\"]",
            "layer_types names 1 layers, but num_hidden_layers is 5"),
        KEY("linear_num_value_heads", "6", "5",
            "linear_num_value_heads 5 must be a multiple of linear_num_key_heads 2"),
        KEY("linear_num_value_heads", "6", "null", "linear_num_value_heads is null, which transformers refuses"),
        KEY("linear_key_head_dim", "8", "2048", "linear_key_head_dim=2048 is out of range"),
        KEY("linear_conv_kernel_dim", "4", "9", "linear_conv_kernel_dim=9 is out of range; give a number from 1 to 8"),
        KEY("partial_rotary_factor", "0.25", "0.3", NULL), // 4 of 16
        KEY("partial_rotary_factor", "0.25", "0.2", "partial_rotary_factor 0.2 rotates 3 of head_dim 16 elements"),
        KEY("partial_rotary_factor", "0.25", "null", "rope_parameters.partial_rotary_factor is null"),
        KEY("head_dim", "16", "16, \"partial_rotary_factor\": 0.5", "partial_rotary_factor is given twice, with diff"),
        KEY("head_dim", "16", "16, \"partial_rotary_factor\": null", "partial_rotary_factor is null"),
        KEY("rope_type", "\"default\"", "\"axial\"", "rope_parameters of type axial is not supported"),
    };
    const DamageSuite suite = {hub_folder(), read_config, NULL, NULL, 0};
    expect_damage_found(&suite, rows, COUNT_OF(rows));
}

static void config_body(const void *text) { config_from_text((const char *)text, "--init", EXIT_USAGE); }

TEST(absurd_states_are_refused) {
    expect_refused(
        config_body, "qwen3_5,linear_num_value_heads=16384,linear_value_head_dim=1024,linear_key_head_dim=2", 2,
        "--init: linear_num_value_heads 16384 x linear_key_head_dim 2 x linear_value_head_dim 1024 is a state");
    expect_refused(config_body, "llama,linear_key_head_dim=128", 2, "linear_key_head_dim is not a key of llama");
    expect_refused(config_body, "qwen3_5,layer_types=ls", 2,
                   "is not a pattern of at most 1024 letters l (linear) and f");
}

// ---- weights --------------------------------------------------------------------------------------------------------
// The text model alone: written by the formula, read back, in files and in a flat .bin; a convolution is [W, 1, 4].
TEST(weights_of_the_text_model) {
    static const DType fp32 = DTYPE_FP32;
    Model model = model_of(HYBRID, fp32);
    const char *folder = fresh_place("text"), *out = fresh_place("out"), *flat = scratch_path("flat.bin");
    FoundTensor found;
    write_formula_model(folder, &model, TEXT_JSON, &fp32, 1);
    convert_flat(folder, flat);
    expect_same_weights(folder, flat, DTYPE_FP32);
    convert(flat, folder, out, NULL, NO_LIMIT);
    expect_same_file(folder, out, "config.json");
    convert(flat, NULL, fresh_place("own"), NULL, NO_LIMIT);
    expect_same_file(out, scratch_path("own"), HF_SINGLE_FILE);
    expect_same_weights(folder, scratch_path("own"), DTYPE_FP32);
    const char *file = read_in(out, HF_SINGLE_FILE, NULL);
    for (size_t i = 0; i < model.parameter_count; i++) {
        assert_true(find_tensor(file, model.parameters[i].name, &found));
        expect_formula(&found, &model.parameters[i]);
        assert_int_equal(found.rank, model.parameters[i].role == ROLE_CONV ? 3 : model.parameters[i].cols ? 2 : 1);
    }
    edit_file(folder, HF_SINGLE_FILE, "\"shape\":[56,1,4]", "\"shape\":[56,4,1]");
    expect_bad(folder,
               "model.layers.0.linear_attn.conv1d.weight has shape [56, 4, 1], but config.json asks for [56, 1, 4]");
    model_free(&model);
}

// ---- composite models -----------------------------------------------------------------------------------------------
#define LARGE (sizeof(Slab) + 77) // bytes, more than the buffer holds

// Tensors outside the text model, of types that we read and others, by name prefix
static const struct {
    const char *name, *dtype;
    size_t rank;
    uint64_t shape[5], bytes;
} extras[] = {
    {"model.visual.patch_embed.proj.weight", "BF16", 5, {3, 2, 1, 2, 2}, 48},
    {"model.visual.blocks.0.attn.qkv.bias", "F32", 1, {7}, 28},
    {"mtp.layers.0.self_attn.q_proj.weight", "F8_E4M3", 2, {3, 5}, 15},
    {"mtp.norm.weight", "BF16", 1, {6}, 12},
    {"mtp.steps", "I64", 0, {0}, 8},
    {"mtp.empty", "U8", 2, {0, 4}, 0},
    {"mtp.large", "U8", 1, {LARGE}, LARGE}, // only beside parameters of mixed types
};

// Returns the tensor's name; beside another family's text model, its name there.
static const char *other_name(size_t other, const Model *model) {
    static char name[HF_NAME];
    const char *tail = strchr(extras[other].name, '.') + 1;
    if (family_has_linear(model->config.family)) return extras[other].name;
    snprintf(name, sizeof(name), "%s.%s", extras[other].name[1] == 'o' ? "vision_tower" : "multi_modal_projector",
             tail);
    return name;
}

static size_t others_beside(int mixed) { return COUNT_OF(extras) - (mixed ? 0 : 1); }

static void *other_bytes(size_t other, unsigned char *bytes) {
    for (size_t i = 0; i < extras[other].bytes; i++) bytes[i] = (unsigned char)(i * 37 + (i >> 20) + other * 101 + 5);
    return bytes;
}

static DType type_of(const Parameter *p, int mixed) {
    return !mixed ? DTYPE_FP32 : p->role == ROLE_DECAY || p->role == ROLE_NORM ? DTYPE_FP32 : DTYPE_BF16;
}

// Returns the element's value, rounded to bf16 if its matrix is.
static double value_of(const Parameter *p, size_t i, int mixed) {
    const double value = formula(p->offset + i);
    return type_of(p, mixed) == DTYPE_FP32 ? (float)value : (double)bf16_to_float(float_to_bf16((float)value));
}

// Writes a folder with this prefix for the text model in place of "model."
static const char *write_folder(const char *name, const Model *model, const char *json, const char *prefix, int mixed) {
    const char *folder = new_place(name);
    char path[PATH_MAX], tensor_name[HF_NAME], *header = (char *)case_memory(100000);
    char *data = (char *)case_memory(model->elements * 4 + LARGE + 1000);
    SafetensorsWriter writer;
    mkdir(folder, 0777);
    path_join(path, folder, "config.json");
    write_file(path, json, strlen(json));
    safetensors_write_begin(&writer, NULL, header, 100000, NULL, NULL);
    for (size_t k = 0; k < others_beside(mixed); k++) {
        other_bytes(k, (unsigned char *)data + writer.data);
        safetensors_write_tensor(&writer, other_name(k, model), extras[k].dtype, extras[k].shape, extras[k].rank,
                                 extras[k].bytes);
    }
    for (size_t i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        for (size_t j = 0; j < parameter_elements(p); j++)
            element_write(data + writer.data, type_of(p, mixed), j, value_of(p, j, mixed));
        hf_tensor_name(model->config.family, prefix, p->name, tensor_name);
        safetensors_write_named(&writer, tensor_name, p, type_of(p, mixed));
    }
    const size_t length = (size_t)safetensors_write_end(&writer);
    path_join(path, folder, HF_SINGLE_FILE);
    write_safetensors(path, header + 8, length - 8, data, (size_t)writer.data);
    return folder;
}

// Checks that a folder has write_folder's other tensors, or none, and all parameters under the prefix, in their types.
static void expect_folder(const char *folder, const Model *model, const char *prefix, int with_others, int mixed) {
    WeightSource *source = weights_open(folder);
    char name[HF_NAME];
    unsigned char *bytes = (unsigned char *)case_memory(LARGE), *wanted = (unsigned char *)case_memory(LARGE);
    FoundTensor found;
    assert_int_equal(source->others.count, with_others ? others_beside(mixed) : 0);
    for (size_t k = 0; with_others && k < others_beside(mixed); k++) {
        const SafeTensor *t = safetensors_find(&source->others, other_name(k, model));
        assert_non_null(t);
        assert_string_equal(t->dtype, extras[k].dtype);
        assert_int_equal(t->rank, extras[k].rank);
        assert_memory_equal(t->shape, extras[k].shape, t->rank * sizeof(uint64_t));
        assert_int_equal(t->end - t->begin, extras[k].bytes);
        if (extras[k].bytes) input_read(&source->files[t->file], t->begin, bytes, (size_t)extras[k].bytes);
        assert_memory_equal(bytes, other_bytes(k, wanted), (size_t)extras[k].bytes);
    }
    const char *file = source->file_count == 1 ? read_in(folder, HF_SINGLE_FILE, NULL) : NULL;
    for (size_t i = 0; file && i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        assert_true(find_tensor(file, hf_tensor_name(model->config.family, prefix, p->name, name), &found));
        if (found.type != type_of(p, mixed)) test_fail("%s is %s", p->name, dtype_name(found.type));
        for (size_t j = 0; j < parameter_elements(p); j++)
            if (found_parameter_value(&found, p, j) != value_of(p, j, mixed)) test_fail("%s[%zu]", p->name, j);
    }
    weights_close(source);
}

#define HUB  "model.language_model."
#define TEXT "model."

// Reads every prefix that transformers takes; refuses tensors that belong to no part of the composite.
TEST(names_of_tensors) {
    static const char *const prefixes[] = {HUB, TEXT, "language_model.", ""};
    Model model = model_of(HYBRID, DTYPE_FP32);
    for (size_t i = 0; i < COUNT_OF(prefixes); i++)
        for (int hub = 0; hub < 2; hub++) {
            test_case("%s, %s", prefixes[i], hub ? "of the hub" : "text alone");
            expect_folder(write_folder("in", &model, hub ? HUB_JSON : TEXT_JSON, prefixes[i], 0), &model, prefixes[i],
                          1, 0);
        }
    const char *folder = write_folder("in", &model, HUB_JSON, HUB, 0);
    edit_file(folder, HF_SINGLE_FILE, "\"mtp.norm.weight\"", "\"ntp.norm.weight\"");
    expect_bad(folder, "Qwen3_5ForCausalLM does not have these tensors with this config.json: ntp.norm.weight");
    folder = write_folder("in", &model, HUB_JSON, HUB, 0);
    edit_file(folder, HF_SINGLE_FILE, HUB "layers.3.mlp.up_proj.weight", HUB "layers.9.mlp.up_proj.weight");
    expect_bad(
        folder,
        "model.language_model.layers.3.mlp.up_proj.weight is missing; there are model.language_model.layers.9.mlp.up");
    model_free(&model);
}

// Text models of other families beside images, with all files' names under "language_model.": the same checks, and
// defaults for keys missing from text_config.
TEST(text_models_beside_images) {
#define SIZES                                                                                                          \
    "\"vocab_size\": 29, \"hidden_size\": 12, \"intermediate_size\": 20, \"num_hidden_layers\": 2, "                   \
    "\"num_attention_heads\": 3, \"num_key_value_heads\": 1, \"head_dim\": 6"
#define BESIDE(name, type, text, keys)                                                                                 \
    "{\"architectures\": [\"" name "ForConditionalGeneration\"], \"model_type\": \"" type "\", \"text_config\": "      \
    "{\"model_type\": \"" text "\", " keys "}, \"vision_config\": {\"model_type\": \"x\"}, \"dtype\": \"float32\"}\n"
    static const char *const jsons[] = {
        BESIDE("Mistral3", "mistral3", "mistral4",
               "\"vocab_size\": 29, \"hidden_size\": 12, \"intermediate_size\": 20, \"num_hidden_layers\": 2, "
               "\"num_attention_heads\": 3, \"num_key_value_heads\": 3, \"q_lora_rank\": 8, \"kv_lora_rank\": 10, "
               "\"qk_nope_head_dim\": 6, \"qk_rope_head_dim\": 4, \"v_head_dim\": 10, \"n_routed_experts\": 4, "
               "\"moe_intermediate_size\": 8, \"num_experts_per_tok\": 2"),
        BESIDE("Mistral3", "mistral3", "ministral3", SIZES ", \"tie_word_embeddings\": true"),
        BESIDE("Mistral3", "mistral3", "mistral", SIZES ", \"tie_word_embeddings\": false"),
        BESIDE("Gemma3", "gemma3", "gemma3_text", SIZES ", \"sliding_window\": 5"),
    };
    static const char *const prefixes[] = {"language_model.model.", HUB, TEXT, "language_model.", ""};
    for (size_t i = 0; i < COUNT_OF(jsons); i++) {
        char remark[256];
        test_case("%.40s", jsons[i]);
        write_file(scratch_path("config.json"), jsons[i], strlen(jsons[i]));
        const Config config = hf_config_read(scratch_path("config.json"), remark, sizeof(remark));
        Model model = model_build(&config, DTYPE_FP32);
        for (size_t k = COUNT_OF(prefixes); k-- > 0;)
            expect_folder(write_folder("in", &model, jsons[i], prefixes[k], 0), &model, prefixes[k], 1, 0);
        convert(lasting("in"), NULL, new_place("out"), NULL, NO_LIMIT);
        expect_folder(lasting("out"), &model, prefixes[0], 1, 0);
        expect_same_file(lasting("in"), lasting("out"), "config.json");
        const Conversion text = {lasting("in"), NULL, new_place("text"), NULL, NO_LIMIT, 1};
        convert_body(&text);
        expect_folder(text.to, &model, TEXT, 0, 0);
        convert(text.to, lasting("in"), new_place("again"), NULL, NO_LIMIT);
        expect_same_file(lasting("out"), lasting("again"), HF_SINGLE_FILE);
        if (!config.tie_word_embeddings) {
            edit_file(lasting("in"), HF_SINGLE_FILE, "\"language_model.lm_head", "\"language_model.lm_hood");
            expect_bad(lasting("in"), "tensor language_model.lm_head.weight is missing");
        }
        model_free(&model);
    }
    const char *gemma = config_of(BESIDE("Gemma3", "gemma3", "gemma3_text",
                                         "\"hidden_size\": 2560, \"intermediate_size\": 10240, "
                                         "\"num_hidden_layers\": 34, \"sliding_window\": 1024, \"rope_scaling\": "
                                         "{\"factor\": 8.0, \"rope_type\": \"linear\"}"));
    const Config preset = config_from_text("gemma3-4b,pad_token_id=0", "test", EXIT_USAGE); // the class's default
    char text[4096];
    config_to_text(&preset, text, sizeof(text));
    assert_string_equal(gemma, text);
}

// Copies the other parts byte for byte, into one file or several, from the folder or beside a flat file. A text model
// alone as `like` gives its own; with text_only no part is copied.
TEST(other_parts_come_along) {
    Model model = model_of(HYBRID, DTYPE_FP32);
    const char *hub = write_folder("hub", &model, HUB_JSON, HUB, 0), *flat = lasting("flat.bin"), *out;
    char path[PATH_MAX];
    path_join(path, hub, "preprocessor_config.json");
    write_file(path, "{}\n", 3);
    convert_flat(hub, flat);
    convert(hub, NULL, out = new_place("out"), NULL, NO_LIMIT);
    expect_folder(out, &model, HUB, 1, 0);
    expect_same_file(hub, out, "config.json");
    expect_same_file(hub, out, "preprocessor_config.json");
    convert(flat, hub, new_place("like"), NULL, NO_LIMIT);
    expect_same_file(out, lasting("like"), HF_SINGLE_FILE);
    expect_same_file(hub, lasting("like"), "config.json");
    convert(out, NULL, new_place("again"), NULL, NO_LIMIT);
    expect_same_file(out, lasting("again"), HF_SINGLE_FILE);
    convert(flat, hub, new_place("shards"), NULL, 3000);
    assert_true(count_paths("%s/model-*", lasting("shards")) > 5);
    expect_folder(lasting("shards"), &model, HUB, 1, 0);
    convert(lasting("shards"), NULL, new_place("again"), NULL, NO_LIMIT);
    expect_same_file(out, lasting("again"), HF_SINGLE_FILE);
    const Conversion text = {hub, NULL, new_place("text"), NULL, NO_LIMIT, 1};
    convert_body(&text);
    expect_folder(text.to, &model, TEXT, 0, 0);
    assert_non_null(strstr(read_in(text.to, "config.json", NULL), "\"Qwen3_5ForCausalLM\""));
    assert_int_equal(count_names(text.to), 3);
    convert(hub, text.to, new_place("again"), NULL, NO_LIMIT);
    expect_same_file(text.to, lasting("again"), HF_SINGLE_FILE);
    const char *with = write_folder("with", &model, TEXT_JSON, TEXT, 0); // further heads beside the text model alone
    convert(with, NULL, new_place("again"), NULL, NO_LIMIT);
    expect_folder(lasting("again"), &model, TEXT, 1, 0);
    Conversion bare = {flat, hub_folder(), new_place("again"), NULL, NO_LIMIT, 0};
    expect_refused(convert_body, &bare, 1, "has no weights, so the other parts of its Qwen3_5ForConditionalGen");
    bare.text_only = 1;
    convert_body(&bare);
    expect_folder(lasting("again"), &model, TEXT, 0, 0);
    model_free(&model);
}

// fp32 vectors beside bf16 matrices, as in some hub folders, keep their type; decay rates also without a folder.
TEST(types_of_vectors) {
    static const DType bf16 = DTYPE_BF16;
    Model model = model_of(HYBRID, DTYPE_FP32);
    const char *hub = write_folder("hub", &model, HUB_JSON, HUB, 1), *flat = lasting("flat.bin");
    const char *out = new_place("out");
    convert_flat(hub, flat);
    convert(hub, NULL, out, NULL, NO_LIMIT);
    expect_folder(out, &model, HUB, 1, 1);
    convert(flat, hub, new_place("like"), &bf16, NO_LIMIT);
    expect_same_file(out, lasting("like"), HF_SINGLE_FILE);
    convert(flat, NULL, new_place("own"), &bf16, NO_LIMIT);
    WeightSource *source = weights_open(lasting("own"));
    for (size_t i = 0; i < model.parameter_count; i++)
        assert_int_equal(source->places[i].type, model.parameters[i].role == ROLE_DECAY ? DTYPE_FP32 : DTYPE_BF16);
    weights_close(source);
    model_free(&model);
}

// Changes the type of the weights in the outermost object and in text_config, positions in text_config alone.
TEST(what_is_changed_in_a_composite_config) {
    static const DType bf16 = DTYPE_BF16;
    Model model = model_of(HYBRID, DTYPE_FP32);
    const char *hub = write_folder("hub", &model, HUB_JSON, HUB, 0), *out = new_place("out"), *found;
    char remark[256], wanted[4096], again[4096];
    convert(hub, NULL, out, &bf16, NO_LIMIT);
    found = read_in(out, "config.json", NULL);
    assert_non_null(strstr(found, "0.25}, \"dtype\": \"bfloat16\", \"tie_word"));
    assert_non_null(strstr(found, "\"hidden_size\": 8, \"dtype\": \"float32\"}"));
    assert_non_null(strstr(found, "\"language_model_only\": false, \"dtype\": \"bfloat16\"\n}\n"));
    WeightSource *source = weights_open(hub);
    source->config = source->model.config = config_scale(&source->config, "yarn,factor=4", "test", EXIT_USAGE);
    HfWrite write = hf_write_prepare(source, NULL, NULL, NO_LIMIT, 0, QUANT_NONE, 0);
    hf_write(&write, new_place("scaled"), 0);
    found = read_in(lasting("scaled"), "config.json", NULL);
    assert_non_null(strstr(found, "\"mrope_section\": [1, 1, 0], \"mrope_interleaved\": true, "));
    assert_non_null(strstr(found, "\"max_position_embeddings\": 512"));
    const Config config = hf_directory_config(lasting("scaled"), remark, sizeof(remark));
    config_to_text(&config, again, sizeof(again)), config_to_text(&source->config, wanted, sizeof(wanted));
    assert_string_equal(again, wanted);
    hf_write_free(&write), weights_close(source);
    model_free(&model);
}

int main(int argc, char **argv) { RUN_LISTED(argc, argv, scratch_remove); }
