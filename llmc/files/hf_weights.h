/*
A Hugging Face model directory as a source of weights: config.json (hf_config.h) and model.safetensors, or the shards
that model.safetensors.index.json lists. Every tensor of the parameter table must occur once, in its shape and in a
supported type. Any other tensor must be known to hold no weights, or belong to another part of a composite model
(WeightSource.others). Base-model files, whose names lack the first part ("transformer." or "model."), are read, too:
published GPT-2 checkpoints lack it.
*/
#ifndef LLMC_HF_WEIGHTS_H
#define LLMC_HF_WEIGHTS_H
#include "hf_config.h"
#include "hf_quantised.h"
#include "llmc/base/pattern.h"
#include "safetensors.h"
#include "weight_source.h"

#define HF_SINGLE_FILE "model.safetensors"
#define HF_INDEX_FILE  "model.safetensors.index.json"

// ---- the files ------------------------------------------------------------------------------------------------------
// Returns the index's weight_map. Refuses a file in another directory before it is opened.
static const cJSON *hf_weight_map(const cJSON *index, const char *path) {
    const cJSON *map = json_get(index, "weight_map"), *item;
    if (!cJSON_IsObject(map) || !map->child) die("%s: has no weight_map; download the file again", path);
    cJSON_ArrayForEach(item, map) {
        const char *name = cJSON_IsString(item) ? item->valuestring : "";
        if (!*name || !json_printable(name))
            die("%s: weight_map names no file for tensor %.200s; download the file again", path, item->string);
        if (strchr(name, '/') || name[0] == '.')
            die("%s: weight_map puts tensor %.200s into \"%.200s\", which is not a file of this directory; download "
                "the file again",
                path, item->string, name);
    }
    return map;
}

// Opens each shard once, in the index's order.
static void hf_open_shards(WeightSource *source, SafeTensors *list, const char *directory, const cJSON *map) {
    const cJSON *item;
    source->files = (InputFile *)checked_calloc((size_t)cJSON_GetArraySize(map), sizeof(InputFile), "the open shards");
    cJSON_ArrayForEach(item, map) {
        char path[PATH_MAX];
        size_t i = 0;
        path_join(path, directory, item->valuestring);
        while (i < source->file_count && strcmp(source->files[i].path, path) != 0) i++;
        if (i < source->file_count) continue;
        if (!path_exists(path))
            die("%s: %s, but " HF_INDEX_FILE " lists it; download the missing file", path, error_text(errno));
        source->files[i] = input_open(path);
        safetensors_read_header(list, &source->files[i], source->file_count++);
    }
}

// Refuses an index that differs from the shards, and tensors that occur twice.
static void hf_check_index(const WeightSource *source, const SafeTensors *list, const cJSON *map, const char *path) {
    const cJSON *item;
    for (size_t i = 1; i < list->count; i++) {
        const SafeTensor *a = &list->tensors[i - 1], *b = &list->tensors[i];
        if (!strcmp(a->name, b->name))
            die("%s: tensor %.200s is also in %s; remove one of the two files", source->files[b->file].path, b->name,
                source->files[a->file].path);
    }
    cJSON_ArrayForEach(item, map) {
        SafeTensor *tensor = safetensors_find(list, item->string);
        if (!tensor || strcmp(path_last(source->files[tensor->file].path), item->valuestring) != 0)
            die("%s: tensor %.200s should be in %s, but is not there; download both files again", path, item->string,
                item->valuestring);
        tensor->used = 1;
    }
    for (SafeTensor *tensor = list->tensors; tensor < list->tensors + list->count; tensor++) {
        if (!tensor->used)
            die("%s: does not list tensor %.200s of %s; download both files again", path, tensor->name,
                source->files[tensor->file].path);
        tensor->used = 0;
    }
}

static void hf_open_files(WeightSource *source, SafeTensors *list, const char *directory) {
    char path[PATH_MAX];
    if (path_found(path, directory, HF_SINGLE_FILE)) {
        source_open_file(source, path);
        safetensors_read_header(list, &source->files[0], 0);
        safetensors_sort(list);
        return;
    }
    if (!path_found(path, directory, HF_INDEX_FILE)) {
        const char *found = folder_matches(directory, "{*model*.{bin,h5,safetensors},consolidated*,*.gguf}");
        die("%s: holds neither " HF_SINGLE_FILE " nor " HF_INDEX_FILE "%s%s%s", directory, *found ? "; it holds " : "",
            found,
            *found ? ", which is not read; give the folder that save_pretrained writes"
                   : "; give the folder of a Hugging Face model");
    }
    cJSON *index = json_read_object(path, HF_CONFIG_MAX);
    const cJSON *map = hf_weight_map(index, path);
    hf_open_shards(source, list, directory, map);
    safetensors_sort(list);
    hf_check_index(source, list, map, path);
    cJSON_Delete(index);
}

// ---- from names to places -------------------------------------------------------------------------------------------
// Returns the length of a name's base-model prefix: "model." in "model.norm.weight", 0 in "lm_head.weight".
static size_t hf_base_prefix(const Family *family, const char *name) {
    size_t length = strcspn(family->names.layer_prefix, ".") + 1;
    return strncmp(name, family->names.layer_prefix, length) ? 0 : length;
}

// Parts of names that files write in another way than transformers has them in memory
static const struct {
    const char *family, *name, *file;
} hf_stored_names[] = {{"lfm3", ".g_proj.", ".gate_proj."},
                       {"granitemoehybrid", ".experts.gate_up_proj", ".input_linear.weight"},
                       {"granitemoehybrid", ".experts.down_proj", ".output_linear.weight"},
                       {"granitemoehybrid", ".router.weight", ".router.layer.weight"}};
#define HF_STORED_NAMES (sizeof(hf_stored_names) / sizeof(hf_stored_names[0]))

// Prints a parameter's name in files with this base-model prefix ("model." or its replacement). With prefix
// "language_model.model." the head is language_model.lm_head.
static const char *hf_tensor_name(const Family *family, const char *prefix, const char *name, char out[HF_NAME]) {
    const size_t cut = hf_base_prefix(family, name), own = strcspn(family->names.layer_prefix, ".") + 1;
    const size_t length = strlen(prefix), outer = length > own ? length - own : 0;
    const int within = outer && prefix[outer - 1] == '.' && !strncmp(prefix + outer, family->names.layer_prefix, own);
    const char *at = NULL, *own_part = "", *file_part = "";
    for (size_t i = 0; i < HF_STORED_NAMES && !at; i++) {
        if (strcmp(family->name, hf_stored_names[i].family) != 0) continue;
        at = strstr(name, hf_stored_names[i].name);
        if (at) own_part = hf_stored_names[i].name, file_part = hf_stored_names[i].file;
    }
    if (!at) at = name + strlen(name);
    snprintf(out, HF_NAME, "%.*s%.*s%s%s",
             cut      ? (int)length
             : within ? (int)outer
                      : 0,
             prefix, (int)(at - name - (ptrdiff_t)cut), name + cut, file_part, at + strlen(own_part));
    return out;
}

// Finds the base-model prefix by the name of the final norm in the files. Tries the prefix of the family, of its
// composite model, and of the base model of each. If no name fits, takes the composite's prefix if config.json
// describes it, else the family's.
static void hf_find_prefix(const SafeTensors *list, const Family *family, int composite, char prefix[64]) {
    const HfComposite *c = hf_composite_of(family);
    const char *norm = family->names.model[FINAL_NORM_WEIGHT];
    const int cut = (int)hf_base_prefix(family, norm);
    char ways[5][64] = {"", "", "", "", ""}, name[HF_NAME];
    snprintf(ways[composite ? 2 : 0], sizeof(ways[0]), "%.*s", cut, norm);
    if (family->stored_as) snprintf(ways[2], sizeof(ways[0]), "%s", family->stored_as);
    if (c) snprintf(ways[composite ? 0 : 2], sizeof(ways[0]), "%s", c->prefix);
    if (c) snprintf(ways[3], sizeof(ways[0]), "%s", c->modules);
    if (c) snprintf(ways[4], sizeof(ways[0]), "%s", c->modules + cut);
    for (size_t i = 0; i < 5; i++) {
        memcpy(prefix, ways[i], sizeof(ways[i]));
        if (safetensors_find(list, hf_tensor_name(family, prefix, norm, name))) return;
    }
    memcpy(prefix, ways[0], sizeof(ways[0]));
}

// Tells whether two tensors of the files hold the same bytes.
static int hf_same_bytes(const WeightSource *source, const SafeTensor *a, const SafeTensor *b) {
    uint64_t bytes = a->end - a->begin, n;
    if (strcmp(a->dtype, b->dtype) != 0 || b->end - b->begin != bytes) return 0;
    for (uint64_t done = 0; done < bytes; done += n) {
        n = bytes - done < sizeof(staged_raw) ? bytes - done : sizeof(staged_raw);
        input_read(&source->files[a->file], a->begin + done, staged_raw.bytes, (size_t)n);
        input_read(&source->files[b->file], b->begin + done, staged_reformed.bytes, (size_t)n);
        if (memcmp(staged_raw.bytes, staged_reformed.bytes, (size_t)n) != 0) return 0;
    }
    return 1;
}

// Finds the token embedding of a tied model, which is also the head. Files have it under the embedding's name, under
// the head's name, or under both with the same bytes. *name: the name found
static SafeTensor *hf_find_tied(const WeightSource *source, const SafeTensors *list, const char **name,
                                const char *second) {
    SafeTensor *embedding = safetensors_find(list, *name), *head = safetensors_find(list, second);
    if (!head) return embedding;
    if (!embedding) return *name = second, head;
    if (head->rank != embedding->rank || memcmp(head->shape, embedding->shape, sizeof(head->shape)) != 0)
        die("%s: tensor %s has shape %s, but config.json ties it to %s, which has %s; set tie_word_embeddings to false",
            source->path, second, shape_text(head->shape, head->rank), *name,
            shape_text(embedding->shape, embedding->rank));
    if (!hf_same_bytes(source, head, embedding))
        die("%s: config.json ties %s to %s, but the files hold two different matrices; set tie_word_embeddings to "
            "false or remove one",
            source->path, second, *name);
    return embedding;
}

// Finds a tensor. Stores the first name that the files lack in source->missing, for hf_take_others.
static SafeTensor *hf_find(WeightSource *source, const SafeTensors *list, const char *name) {
    SafeTensor *tensor = safetensors_find(list, name);
    if (!tensor && !*source->missing) snprintf(source->missing, sizeof(source->missing), "%s", name);
    return tensor;
}

// Takes a tensor of this shape and a supported dtype. asks, advice: words of the error message before and after the
// expected shape
static TensorLocation source_take_shape(const WeightSource *source, SafeTensor *tensor, const uint64_t *wanted,
                                        size_t rank, const char *asks, const char *advice) {
    const TensorLocation place = {tensor->file, tensor->begin, tensor->type, 0};
    const char *path = source->files[tensor->file].path;
    if (tensor->rank != rank || memcmp(tensor->shape, wanted, rank * sizeof(wanted[0])) != 0)
        die("%s: tensor %s has shape %s, but %s for %s%s", path, tensor->name, shape_text(tensor->shape, tensor->rank),
            asks, shape_text(wanted, rank), advice);
    if (tensor->type == DTYPE_COUNT)
        die("%s: tensor %s has dtype %s; F32, F16, BF16 and F64 are supported; if it is quantised, take the original "
            "model and --base nf4",
            path, tensor->name, tensor->dtype);
    tensor->used = 1;
    return place;
}

// Takes a tensor as the parameter.
static void source_take_tensor(WeightSource *source, size_t parameter, SafeTensor *tensor, const char *asks,
                               const char *advice) {
    uint64_t wanted[3];
    const size_t rank = parameter_shape(&source->model.parameters[parameter], wanted);
    source->places[parameter] = source_take_shape(source, tensor, wanted, rank, asks, advice);
}

// ---- OLMo's hybrid --------------------------------------------------------------------------------------------------
// Replaces a norm's name in memory by the name in files. Layers of linear attention have the names of files; saved by
// transformers, attention layers have one of them, too.
static void hf_hybrid_norm(const Family *family, char name[HF_NAME]) {
    static const char *const norms[][2] = {{"input_layernorm.weight", "attention_layer_norm.weight"},
                                           {"post_attention_layernorm.weight", "feedforward_layer_norm.weight"}};
    for (size_t i = 0; family->linear_pre_norms && i < 2; i++)
        if (text_ends_with(name, norms[i][0]))
            memcpy(name + strlen(name) - strlen(norms[i][0]), norms[i][1], strlen(norms[i][1]) + 1);
}

// Finds a norm under its name in files.
static SafeTensor *hf_find_norm(const SafeTensors *list, const Family *family, const char *name) {
    char other[HF_NAME];
    snprintf(other, sizeof(other), "%s", name);
    hf_hybrid_norm(family, other);
    return safetensors_find(list, other);
}

// Tells whether files hold the convolution in three tensors: channels of q, of k and of v.
static int hf_splits_convolution(const Family *family, const Parameter *p) {
    return p->role == ROLE_CONV && family->names.layer.IN_K_WEIGHT;
}

// Prints the name of one of these three: linear_attn.q_conv1d.weight for linear_attn.conv1d.weight.
static void hf_convolution_name(const char *name, size_t part, char out[HF_NAME]) {
    const size_t begin = strlen(name) - strlen("conv1d.weight");
    snprintf(out, HF_NAME, "%.*s%c_%s", (int)begin, name, "qkv"[part], name + begin);
}

// Takes a convolution in three tensors. transformers saves thirds, whatever the widths of q, k and v: so the tensors
// follow one another, and only their sum is checked. Returns 0 if the files lack one.
static int hf_take_convolution(WeightSource *source, size_t parameter, const SafeTensors *list, const char *name) {
    const Parameter *p = &source->model.parameters[parameter];
    TensorLocation place[3];
    size_t rows[3], all = 0, run = 0, n = 0;
    char own[HF_NAME];
    if (!hf_splits_convolution(source->config.family, p)) return 0;
    for (size_t i = 0; i < 3; i++) {
        hf_convolution_name(name, i, own);
        SafeTensor *tensor = hf_find(source, list, own);
        if (!tensor) return 0;
        const uint64_t wanted[3] = {tensor->shape[0], 1, p->cols};
        place[i] = source_take_shape(source, tensor, wanted, 3, "config.json asks", "");
        all += rows[i] = (size_t)wanted[0];
        run = greatest_common_divisor(rows[i], run);
        if (all > p->rows || (i == 2 && all < p->rows) || place[i].type != place[0].type)
            die("%s: the convolutions of q, k, v up to tensor %s have %zu channels; config.json asks for %zu, all in "
                "one "
                "type",
                source->path, own, all, p->rows);
    }
    source->places[parameter] = place[0];
    const TensorPieces *pieces = source_set_pieces(source, parameter, p->rows / run);
    for (size_t i = 0; i < 3; i++)
        for (size_t row = 0; row < rows[i]; row += run, n++) {
            pieces->place[n] = place[i];
            pieces->place[n].offset += (uint64_t)(row * p->cols) * dtype_size(place[i].type);
        }
    return 1;
}

// ---- experts --------------------------------------------------------------------------------------------------------
// Prints the name of a parameter's piece in files, or of the router in files with split experts.
static const char *hf_piece_name(const Family *family, const char *prefix, const Parameter *p, size_t piece,
                                 char out[HF_NAME]) {
    const int down = p->experts && text_ends_with(p->name, family->names.layer.EXPERTS_DOWN);
    const char *own = layer_name(family, !p->experts ? ROUTER_WEIGHT : down ? EXPERTS_DOWN : EXPERTS_GATE_UP);
    const char *split =
        !p->experts ? family->names.router : family->names.expert[down ? 2 : piece % expert_parts(family)];
    char name[HF_NAME];
    if (!split || !text_ends_with(p->name, own)) return hf_tensor_name(family, prefix, p->name, out);
    const size_t begin = strlen(p->name) - strlen(own);
    memcpy(name, p->name, begin);
    snprintf(name + begin, sizeof(name) - begin, split, down ? piece : piece / expert_parts(family));
    return hf_tensor_name(family, prefix, name, out);
}

// Takes the tensors of a split parameter. All must have one shape and dtype, and none may be in 4 bits. fp8: the format
// of config.json
static void hf_take_pieces(WeightSource *source, size_t parameter, const SafeTensors *list, const char *prefix,
                           QuantFormat fp8) {
    const Parameter *p = &source->model.parameters[parameter];
    const Family *family = source->config.family;
    const size_t count = parameter_pieces(family, p);
    const uint64_t wanted[2] = {p->rows / count, p->cols};
    char name[HF_NAME];
    const TensorPieces *pieces = source_set_pieces(source, parameter, count);
    for (size_t i = 0; i < count; i++) {
        SafeTensor *tensor = hf_find(source, list, hf_piece_name(family, prefix, p, i, name));
        if (!tensor) continue;
        if (hf_quantised_type(list, name) != QUANT_NONE)
            die("%s: tensor %s is in 4 bits, which is not supported for experts; take the original model and --base "
                "nf4",
                source->path, name);
        if (hf_is_fp8(tensor)) tensor->type = DTYPE_BF16;
        const TensorLocation place = source_take_shape(source, tensor, wanted, 2, "config.json asks", "");
        if (hf_is_fp8(tensor))
            hf_take_fp8(source, parameter, list, fp8, tensor, i, count);
        else if (source_is_quantised(source, parameter))
            die("%s: tensor %s is in %s, but the experts before it are in FP8; take the bf16 model", source->path, name,
                dtype_name(place.type));
        else if (!i)
            source->places[parameter] = place;
        if (place.type != source->places[parameter].type && !*source->missing)
            die("%s: tensor %s is in %s, but the experts before it are in %s; save all experts in one type",
                source->path, name, dtype_name(place.type), dtype_name(source->places[parameter].type));
        pieces->place[i] = place;
    }
}

// Tells whether the files hold a tensor per expert.
static int hf_is_split(const Model *model, const SafeTensors *list, const char *prefix) {
    char name[HF_NAME];
    for (size_t i = 0; i < model->parameter_count && model->config.family->names.expert[0]; i++)
        if (model->parameters[i].experts)
            return !safetensors_find(list,
                                     hf_tensor_name(model->config.family, prefix, model->parameters[i].name, name));
    return 0;
}

// Finds layer l's part of Model.constants, and prints the tensor's name in files. Returns the number of elements; 0:
// layer l has no constants
static size_t hf_layer_constants(const Model *model, const char *prefix, size_t l, float **values, char out[HF_NAME]) {
    const Config *c = &model->config;
    char name[HF_NAME];
    const size_t begin = (size_t)snprintf(name, sizeof(name), c->family->names.layer_prefix, l);
    if (!model->layer_scalar && (!model->router_bias || !layer_has_experts(c, l))) return 0;
    snprintf(name + begin, sizeof(name) - begin, "%s",
             model->layer_scalar                 ? "layer_scalar"
             : family_has_convolution(c->family) ? "feed_forward.expert_bias"
                                                 : "");
    if (!model->layer_scalar && !family_has_convolution(c->family)) { // next to the router's weight
        const char *router = c->family->names.layer.ROUTER_WEIGHT;
        snprintf(name + begin, sizeof(name) - begin, "%.*s.e_score_correction_bias",
                 (int)(strlen(router) - strlen(".weight")), router);
    }
    hf_tensor_name(c->family, prefix, name, out);
    *values = model->layer_scalar ? model->layer_scalar + l
                                  : model->router_bias + expert_layers_before(c, l) * c->num_experts;
    return model->layer_scalar ? 1 : c->num_experts;
}

// Reads Model.constants: the routers' biases, or factors that scale the layers' outputs.
static void hf_take_constants(WeightSource *source, const SafeTensors *list, const char *prefix) {
    float *values;
    char name[HF_NAME];
    for (size_t l = 0; l < source->config.num_hidden_layers; l++) {
        const uint64_t count = hf_layer_constants(&source->model, prefix, l, &values, name);
        if (!count) continue;
        SafeTensor *tensor = hf_find(source, list, name);
        if (!tensor) continue;
        const TensorLocation place = source_take_shape(source, tensor, &count, 1, "config.json asks", "");
        input_read(&source->files[place.file], place.offset, staged_raw.bytes, count * dtype_size(place.type));
        elements_convert(values, DTYPE_FP32, staged_raw.bytes, place.type, count);
        source_refuse_bad(source->path, name, 0, 0, count, DTYPE_FP32, values);
        source->constants_type = place.type;
    }
}

// Tells whether a tensor holds no weights to load: masks and frequencies of older versions, the second copy of a tied
// matrix.
static int hf_is_no_weight(const Config *config, const char *name, const char *head) {
    if (config->family->learned_positions)
        if (text_ends_with(name, ".attn.bias") || text_ends_with(name, ".attn.masked_bias")) return 1;
    if (!config->family->learned_positions)
        if (text_ends_with(name, ".rotary_emb.inv_freq") || !strcmp(name, "rotary_emb.inv_freq")) return 1;
    return config->tie_word_embeddings && !strcmp(name, head);
}

// Tells whether a tensor projects keys or values in a layer that uses another layer's keys and values.
static int hf_is_unread(const Config *config, const char *name) {
    static const char *const unread[] = {
        "k_proj.weight", "v_proj.weight",           "k_norm.weight",          "k_proj.bias",
        "v_proj.bias",   "k_proj.weight_scale_inv", "v_proj.weight_scale_inv"};
    char own[64];
    for (size_t l = config->num_hidden_layers - config->num_kv_shared_layers; l < config->num_hidden_layers; l++)
        for (size_t i = 0; i < sizeof(unread) / sizeof(unread[0]); i++) {
            snprintf(own, sizeof(own), "layers.%zu.self_attn.%s", l, unread[i]);
            if (text_ends_with(name, own)) return 1;
        }
    return 0;
}

// Tells whether a tensor is not loaded: it belongs to another part of the composite model, to a layer after the last
// layer (multi-token prediction, in models whose routers have biases), or is never read.
static int hf_is_other(const Config *config, const char *name) {
    const Family *family = config->family;
    const HfComposite *composite = hf_composite_of(family);
    char after[64];
    snprintf(after, sizeof(after), family->names.layer_prefix, config->num_hidden_layers);
    if (family->router == ROUTER_SIGMOID && !strncmp(name, after, strlen(after))) return 1;
    if ((family->fused_heads || family->bare_attention) && !strncmp(name, "mtp.", 4)) return 1;
    if (hf_is_unread(config, name)) return 1;
    for (const char *one = composite ? composite->others : ""; *one;) {
        const size_t length = strcspn(one, "|");
        if (strncmp(name, one, length) == 0) return 1;
        one += length + (one[length] == '|');
    }
    return 0;
}

// Tells whether a tensor of an FP8 folder holds scales of activations or of keys and values, which nothing reads here.
static int hf_is_activation_scale(const WeightSource *source, const char *name) {
    static const char *const ends[] = {"activation_scale", ".input_scale", ".output_scale", ".k_scale", ".v_scale"};
    for (size_t i = 0; source->quant && i < sizeof(ends) / sizeof(ends[0]); i++)
        if (text_ends_with(name, ends[i])) return 1;
    return 0;
}

// Adds tensors outside the text model to source->others. Refuses unknown tensors, and files that lack a tensor. head:
// name of the second copy of a tied model's matrix
static void hf_take_others(WeightSource *source, const SafeTensors *list, const char *head) {
    SafeTensors *others = &source->others;
    char advice[128] = "; take the original model, not wrapped or quantised; --base nf4 quantises it";
    others->tensors = (SafeTensor *)checked_calloc(list->count + 1, sizeof(SafeTensor), "the list of other tensors");
    for (size_t i = 0; i < list->count; i++) {
        SafeTensor *tensor = &list->tensors[i];
        if (tensor->used || (tensor->used = hf_is_no_weight(&source->config, tensor->name, head)) != 0) continue;
        if (hf_is_other(&source->config, tensor->name) || hf_is_activation_scale(source, tensor->name)) {
            if (strlen(tensor->name) >= HF_NAME)
                die("%s: tensor %.200s... has a longer name than the supported %d bytes; save it under a shorter name",
                    source->files[tensor->file].path, tensor->name, HF_NAME - 1);
            others->tensors[others->count] = *tensor;
            others->tensors[others->count++].name = checked_strdup(tensor->name);
            tensor->used = 1;
        } else if (text_ends_with(tensor->name, source->missing)) { // _orig_mod.NAME, as torch.compile saves it
            const int n = (int)(strlen(tensor->name) - strlen(source->missing)) - 1,
                      peft = !strncmp(tensor->name, "base_model.", 11);
            if (n < 0 || tensor->name[n] != '.') continue; // language_model.NAME is no wrapper's name of model.NAME
            snprintf(advice, sizeof(advice), "; save the model within the wrapper: model.%.*s", peft ? 18 : n,
                     peft ? "merge_and_unload()" : tensor->name);
        }
    }
    const char *unknown = safetensors_unused(list);
    if (*source->missing)
        die("%s: tensor %s is missing%s%s%s", source->path, source->missing, *unknown ? "; there are " : "", unknown,
            *unknown ? advice : "");
    if (*unknown)
        die("%s: %s does not have these tensors with this config.json: %s; take the config.json that belongs to the "
            "weights",
            source->path, source->config.family->architecture, unknown);
}

// Reads the configuration alone. `remark`: a line for users who train the model, or empty
static Config hf_directory_config(const char *directory, char *remark, size_t size) {
    char path[PATH_MAX];
    if (path_found(path, directory, "config.json")) return hf_config_read(path, remark, size);
    const char *within = folder_matches(directory, "*/{,adapter_}config.json");
    die("%s: holds no config.json; give %s", directory,
        *within ? within : "a Hugging Face model directory or a run's folder");
}

// Returns the composite model that a folder's config.json describes, or NULL.
static const HfComposite *hf_directory_composite(const char *directory) {
    char path[PATH_MAX];
    path_join(path, directory, "config.json");
    cJSON *root = json_read_object(path, HF_CONFIG_MAX);
    const HfComposite *composite = hf_composite(root);
    cJSON_Delete(root);
    return composite;
}

// Returns the prefix of layers' names in adapters over the model at `path`, if transformers loads it as a composite.
// NULL: the prefix of the text model.
static const char *hf_adapter_prefix(const char *path) {
    const HfComposite *composite = folder_has(path, "config.json") ? hf_directory_composite(path) : NULL;
    return composite && !composite->text_loads ? composite->modules : NULL;
}

// Tells whether a module's name begins or ends with an entry of a list of modules that are not quantised, or matches an
// entry "re:" and a pattern. Entries may have another prefix before "layers." than the name.
static int hf_skips(const cJSON *list, const char *name, const char *path) {
    const cJSON *item;
    const char *of_layer = strstr(name, "layers.");
    char module[HF_NAME];
    cJSON_ArrayForEach(item, list) {
        const char *entry = cJSON_IsString(item) ? item->valuestring : "", *layers = strstr(entry, "layers.");
        snprintf(module, sizeof(module), "%.*s", (int)(strlen(name) - strlen(".weight")), name);
        if (!strncmp(entry, "re:", 3)) {
            if (pattern_matches(entry + 3, module, 0, path, EXIT_RUNTIME)) return 1;
            continue;
        }
        if (layers && of_layer)
            memmove(module, module + (of_layer - name), strlen(module) - (size_t)(of_layer - name) + 1);
        if (layers && of_layer) entry = layers;
        const size_t n = strlen(entry), length = strlen(module);
        if (!n || n > length) continue;
        if (!strncmp(module, entry, n) && (n == length || module[n] == '.')) return 1;
        if (n < length && !strcmp(module + length - n, entry) && module[length - n - 1] == '.') return 1;
    }
    return 0;
}

// Returns the format of matrices by the folder's config.json, or by ModelOpt's own file. *root: the object that
// has quantization_config, itself or in text_config
static QuantFormat hf_directory_quantised(const char *directory, cJSON **root) {
    char path[PATH_MAX];
    path_join(path, directory, "config.json");
    *root = json_read_object(path, HF_CONFIG_MAX);
    const QuantFormat format = hf_config_quantised(*root, path);
    if (format.type != QUANT_NONE) return format;
    const QuantFormat inner = hf_config_quantised(json_get(*root, "text_config"), path);
    if (inner.type != QUANT_NONE || !path_found(path, directory, HF_MODELOPT)) return inner;
    cJSON *file = json_read_object(path, HF_CONFIG_MAX), *own = cJSON_DetachItemFromObject(file, "quantization");
    cJSON_Delete(*root), cJSON_Delete(file);
    *root = cJSON_CreateObject();
    if (cJSON_IsObject(own) && !json_get(own, "quant_method")) cJSON_AddStringToObject(own, "quant_method", "modelopt");
    cJSON_AddItemToObject(*root, "quantization_config", own);
    return hf_config_quantised(*root, path);
}

// Returns format[parameters of the model] by config.json alone, for a plan, which opens no weights; NULL: no matrix is
// quantised. The caller frees it.
static QuantFormat *hf_directory_formats(const char *directory, const Model *model) {
    static const char *const lists[] = {"llm_int8_skip_modules", "modules_to_not_convert", "ignored_layers", "ignore",
                                        "exclude_modules"};
    cJSON *root;
    const QuantFormat format = hf_directory_quantised(directory, &root);
    const cJSON *text = json_get(root, "text_config"), *own = json_get(root, "quantization_config"), *skipped = NULL;
    if (!own) own = json_get(text, "quantization_config");
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]) && !cJSON_IsArray(skipped); i++)
        skipped = json_get(own, lists[i]);
    QuantFormat *formats = NULL;
    if (format.type != QUANT_NONE)
        formats = (QuantFormat *)checked_calloc(model->parameter_count, sizeof(QuantFormat), "formats");
    for (size_t i = 0; formats && i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const int head = cJSON_IsArray(skipped) && !model->config.tie_word_embeddings; // the default list has lm_head
        if (hf_quantises(model, p, format.type, head) && !hf_skips(skipped, p->name, directory))
            formats[i] = parameter_format(format, model->config.family, p);
    }
    cJSON_Delete(root);
    return formats;
}

static void hf_remark_quantised(WeightSource *source) {
    size_t count = 0, experts = 0;
    int has_static = 0; // 1: scales of activations
    QuantFormat format = {QUANT_NONE, 0, 0, DTYPE_FP32, {0}};
    for (size_t i = 0; source->quant && i < source->model.parameter_count; i++)
        if (source_is_quantised(source, i))
            format = source->quant[i], count++;
        else
            experts += source->model.parameters[i].experts;
    for (size_t i = 0; i < source->others.count; i++)
        has_static |= hf_is_activation_scale(source, source->others.tensors[i].name);
    if (count && !*source->remark && format.type == QUANT_FP8)
        snprintf(source->remark, sizeof(source->remark),
                 "%zu matrices are in FP8; their values are bf16(code x scale)%s", count,
                 has_static ? "; scales of activations are not used" : "");
    else if (count && !*source->remark && format.type == QUANT_MXFP4)
        snprintf(source->remark, sizeof(source->remark), "%zu stacks of experts are in 4 bits (mxfp4)", count);
    else if (count && !*source->remark)
        snprintf(source->remark, sizeof(source->remark), "%zu matrices are in 4 bits (%s%s), quantised from %s%s%s",
                 count, quant_type_names[format.type], format.nested ? ", double quantisation" : "",
                 dtype_name(format.rounding), experts ? "; experts are not: to quantise them, too, give --base " : "",
                 experts ? quant_type_names[format.type] : "");
}

static void hf_open(WeightSource *source, const char *directory) {
    SafeTensors list = {NULL, 0};
    char prefix[64], file_name[HF_NAME], head[HF_NAME];
    source->format = "Hugging Face directory";
    source->transposed = 1;
    source->config = hf_directory_config(directory, source->remark, sizeof(source->remark));
    hf_open_files(source, &list, directory);
    source_set_table(source, model_build(&source->config, DTYPE_FP32));
    const Family *family = source->config.family;
    hf_find_prefix(&list, family, hf_directory_composite(directory) != NULL, prefix);
    hf_tensor_name(family, prefix, family->names.model[LM_HEAD], head);
    const int split = hf_is_split(&source->model, &list, prefix);
    cJSON *root;
    const QuantFormat fp8 = hf_directory_quantised(directory, &root);
    cJSON_Delete(root);
    for (size_t i = 0; i < source->model.parameter_count; i++) {
        const Parameter *p = &source->model.parameters[i];
        if (split && p->experts) {
            hf_take_pieces(source, i, &list, prefix, fp8);
            continue;
        }
        const char *name =
            split ? hf_piece_name(family, prefix, p, 0, file_name) : hf_tensor_name(family, prefix, p->name, file_name);
        SafeTensor *tensor = i == 0 && source->config.tie_word_embeddings ? hf_find_tied(source, &list, &name, head)
                                                                          : safetensors_find(&list, name);
        if (!tensor) tensor = hf_find_norm(&list, family, name);
        if (!tensor && (hf_take_convolution(source, i, &list, name) || hf_take_mxfp4(source, i, &list, name) ||
                        !hf_find(source, &list, name)))
            continue;
        const QuantType type = hf_quantised_type(&list, name);
        if (hf_is_fp8(tensor)) tensor->type = DTYPE_BF16; // the type of decoded values
        if (type == QUANT_NONE) source_take_tensor(source, i, tensor, "config.json asks", "");
        if (hf_is_fp8(tensor)) hf_take_fp8(source, i, &list, fp8, tensor, 0, 1);
        if (type != QUANT_NONE) hf_take_quantised(source, i, &list, tensor, type);
    }
    hf_take_constants(source, &list, prefix);
    hf_take_others(source, &list, head);
    safetensors_free(&list);
    hf_remark_quantised(source);
}

#endif
