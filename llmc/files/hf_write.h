/*
Writes a model as a Hugging Face folder, from any source of weights: model.safetensors, or shards and their index above
the largest shard size, config.json (hf_config.h), and the small files of the model. If config.json describes a
composite model, the tensors of its other parts are copied. transformers would write the same bytes: the same header,
tensors by type and then by name. Tensors are read in the file's order, so writing is one pass from the first byte to
the last, in the memory of the staging buffers. The folder is complete or absent.
*/
#ifndef LLMC_HF_WRITE_H
#define LLMC_HF_WRITE_H
#include "hf_kept.h"
#include "hf_write_quantised.h"
#include "llmc/base/output.h"
#include "llmc/base/progress.h"
#include "merge.h"
#include "model_card.h"
#include "safetensors.h"
#include "llmc/tokenizer/tokenizer_file.h"
#include "weights.h"

typedef struct {
    char name[HF_PART_NAME];
    const Parameter *p;
    size_t parameter, shard; // index in the table; index of the file
    size_t piece;            // FP8: which of the parameter's tensors
    HfPart part;             // which tensor of a 4-bit matrix
    const char *dtype;       // dtype of this part of a 4-bit matrix
    DType type;              // type to write
    size_t first, elements;  // range of the parameter, or number of a layer's constants
    const float *constants;  // [elements] a layer's constants, or NULL
    const SafeTensor *other; // a tensor of `from` to copy, which is no parameter; or a tensor of FP8; or NULL
    const WeightSource *from;
    uint64_t bytes;
} HfTensor;

typedef struct {
    const WeightSource *source;
    const char *kept;   // folder to copy config.json and the small files from, or NULL
    WeightSource *like; // weights of that folder, if it is composite or mixes types or forms; may equal source
    int split;          // 1: write a tensor for each matrix of an expert
    const HfComposite *composite; // composite model that the folder describes, or NULL
    int text_only;            // 1: write a new config.json, leave out the parts of a composite model that are not text
    char tokenizer[PATH_MAX]; // tokenizer file that replaces the folder's; else ""
    HfChat chat;              // chat of that tokenizer file
    HfCodes codes;            // matrices to write in 4 bits
    int retype;               // 1: change the type in config.json
    int rescale;              // 1: change the scaling of rotary positions
    int regrow;               // 1: change the vocabulary size
    size_t max_shard_size;    // most bytes of tensors in a file
    HfTensor *tensors;        // [count] in the order of files and of tensors in them
    DType type;               // type of all tensors, or a type that can hold every tensor's values
    size_t count, shards;
    uint64_t bytes, elements; // totals over all tensors
} HfWrite;

#define HF_SHARDS_MAX 99999 // largest number in a shard's name

// ---- the small files ------------------------------------------------------------------------------------------------
// Finds the tokenizer file for the folder: --tokenizer FILE, else the tokenizer file in the run's folder (of merged
// adapters or of the model) if that file was made from the kept folder's tokenizer.json. Call after hf_write_prepare.
// word: value of
// --tokenizer
static void hf_find_tokenizer(HfWrite *write, const char *word) {
    const WeightSource *source = write->source;
    const char *kept = write->kept ? write->kept : "";
    const int given = strcmp(word, "auto") != 0;
    char path[PATH_MAX], found[PATH_MAX];
    if (!strcmp(word, "none")) return;
    snprintf(found, sizeof(found), "%s", word);
    if (!given && (source->random || (!(source->merge && tokenizer_beside(source->merge->adapter->path, found)) &&
                                      (write->kept == source->path || !tokenizer_beside(source->path, found)))))
        return;
    Tokenizer *t = tokenizer_open(found);
    if (!*kept || (path_found(path, kept, "tokenizer.json") && t->fingerprint == tokenizer_fingerprint(path))) {
        memcpy(write->tokenizer, found, sizeof(found));
        write->chat = hf_chat_prepare(kept, t);
    } else if (given) {
        die("--tokenizer %s was not made from a tokenizer.json in %s; give --like FOLDER of its model", found, kept);
    } else {
        note("%s is not copied, because it was not made from a tokenizer.json in %s; write it again with "
             "data/tokenizer_file.py",
             found, kept);
        tokenizer_close(t);
    }
}

// Returns the source of the folder's tokenizer: the kept folder or a file of the run; "": none.
static const char *hf_tokenizer_from(const HfWrite *write) {
    static const char *const names[] = {"tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json",
                                        TOKENIZER_NAME};
    for (size_t i = 0; write->kept && i < sizeof(names) / sizeof(names[0]); i++)
        if (folder_has(write->kept, names[i])) return write->kept;
    return write->tokenizer;
}

// ---- which tensor goes into which file ------------------------------------------------------------------------------
static const char *hf_dtype_of(const HfTensor *t) {
    return t->other ? t->other->dtype : t->part ? t->dtype : safetensors_dtypes[t->type].name;
}

// Returns the rank of a type in the reference implementation's order.
static size_t hf_dtype_rank(const char *dtype) {
    static const char *const order[] = {"U64", "I64", "F64",     "F32",     "U32",     "I32", "BF16", "F16",
                                        "U16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8",  "U8"};
    size_t i = 0;
    while (i < sizeof(order) / sizeof(order[0]) && strcmp(order[i], dtype) != 0) i++;
    return i;
}

// Compares in the reference implementation's order: large types first, then by name.
static int hf_compare_order(const void *a, const void *b) {
    const HfTensor *x = (const HfTensor *)a, *y = (const HfTensor *)b;
    const size_t p = hf_dtype_rank(hf_dtype_of(x)), q = hf_dtype_rank(hf_dtype_of(y));
    if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
    return p != q ? (p < q ? -1 : 1) : compare_texts(a, b);
}

// Divides the table into files. Each file takes tensors while they fit; a tensor above the limit is alone in its file.
static void hf_cut_shards(HfWrite *write) {
    uint64_t used = 0;
    write->shards = 1;
    for (HfTensor *t = write->tensors; t < write->tensors + write->count; t++) {
        if (used && (t->bytes > write->max_shard_size || used > write->max_shard_size - t->bytes))
            write->shards++, used = 0;
        t->shard = write->shards - 1;
        used += t->bytes, write->bytes += t->bytes;
    }
    if (write->shards > HF_SHARDS_MAX)
        die("--max-shard-size: makes %zu files, at most %d are possible; give a larger size", write->shards,
            HF_SHARDS_MAX);
    qsort(write->tensors, write->count, sizeof(*write->tensors), hf_compare_order);
}

// Refuses a kept config.json that describes another model. Positions may have been scaled and tokens added since.
static void hf_check_kept(HfWrite *write) {
    const Config *config = &write->source->config;
    char ours[1024], theirs[1024];
    Config like = hf_directory_config(write->kept, theirs, sizeof(theirs));
    config_scaling_text(config, ours, sizeof(ours)), config_scaling_text(&like, theirs, sizeof(theirs));
    write->rescale = config->rope.type != ROPE_DEFAULT && strcmp(ours, theirs) != 0;
    if (write->rescale) like = config_scale(&like, ours, write->kept, EXIT_RUNTIME);
    const size_t rows = like.vocab_size;
    write->regrow = rows < config->vocab_size;
    if (write->regrow) like.vocab_size = config->vocab_size;
    hf_check_same_model(config, write->source->path, &like, write->kept);
    if (write->regrow)
        note("%s has a vocabulary of %zu; put the tokenizer with the added tokens, up to %zu, into the new folder",
             write->kept, rows, config->vocab_size);
}

// Tells whether folders of a family may mix types of tensors or forms of experts.
static int hf_has_forms(const Family *family) { return family_has_linear(family) || family->router; }

// Opens the weights of the kept folder. A folder of a text model alone may have no weights.
static void hf_open_like(HfWrite *write, WeightSource *source, QuantType quant) {
    const HfComposite *composite = write->kept ? hf_directory_composite(write->kept) : NULL;
    if (quant && composite && (quant != QUANT_FP8 || source->stored != QUANT_FP8))
        write->text_only = 1; // other parts of a composite model cannot be quantised here
    if (!composite && !(write->kept && hf_has_forms(source->config.family))) return;
    if (write->kept == source->path)
        write->like = source;
    else if (folder_has(write->kept, HF_SINGLE_FILE) || folder_has(write->kept, HF_INDEX_FILE))
        write->like = weights_open(write->kept);
    else if (composite && !write->text_only)
        die("%s: has no weights, so the other parts of its %s cannot be copied; give a complete folder, or --to "
            "text",
            write->kept, composite->architecture);
    if (!write->text_only) write->composite = composite;
}

// Refuses to write a text model alone if transformers has no class of it.
static void hf_check_class(const HfWrite *write) {
    const Family *family = write->source->config.family;
    const HfComposite *whole = hf_composite_of(family);
    if (!write->composite && whole && !strcmp(whole->architecture, family->architecture))
        die("%s: transformers has no class for the text model of %s alone; give --like FOLDER of the whole model, or "
            "a .bin file",
            write->source->path, family->name);
}

// Returns the type to write a parameter in: the chosen type, else the parameter's type in the source. A vector whose
// type in the folder is wider than the embedding's type keeps that type; so does a router with biases. Decay rates
// (A_log) stay fp32, since their exponentials affect everything.
static DType hf_type_of(const HfWrite *write, size_t i, const DType *chosen) {
    const WeightSource *source = write->source, *like = write->like;
    const Parameter *p = &source->model.parameters[i];
    const DType own = source->places[i].type, type = chosen ? *chosen : own;
    const DType other = like ? like->places[i].type : type;
    const int wide = p->role == ROLE_ROUTER && source->config.family->router == ROUTER_SIGMOID &&
                     family_has_shared(source->config.family);
    if (type == DTYPE_FP16 && own != DTYPE_FP16)
        die("%s: weights cannot be converted to fp16; choose fp32 or bf16", source->path);
    if (like && (!p->cols || wide) && dtype_size(other) > dtype_size(like->places[0].type) &&
        dtype_size(other) > dtype_size(type))
        return other;
    if ((p->role == ROLE_DECAY || wide) && dtype_size(type) < dtype_size(DTYPE_FP32) &&
        dtype_size(own) > dtype_size(type))
        return DTYPE_FP32;
    return type;
}

static void hf_add_parameter(HfWrite *write, size_t i, const char *prefix, const DType *chosen) {
    const Family *family = write->source->config.family;
    const Parameter *p = &write->source->model.parameters[i];
    char name[HF_NAME];
    const Config *c = &write->source->config;
    const size_t layer = group_of(&write->source->model, p->offset);
    const int three = hf_splits_convolution(family, p);
    const size_t keys = c->linear_num_key_heads * c->linear_key_head_dim * p->cols;
    const size_t count = three ? 3 : write->split ? parameter_pieces(family, p) : 1;
    const size_t all = parameter_file_elements(p), each = three ? keys : all / count;
    if (p->joined && p->part) return; // the first part's tensor in the file holds all parts
    for (size_t piece = 0; piece < count; piece++) {
        HfTensor *t = &write->tensors[write->count++];
        t->p = p, t->parameter = i, t->type = hf_type_of(write, i, chosen);
        t->first = piece * each, t->elements = piece + 1 < count ? each : all - t->first;
        t->bytes = (uint64_t)t->elements * dtype_size(t->type);
        if (write->split)
            hf_piece_name(family, prefix, p, piece, t->name);
        else
            hf_tensor_name(family, prefix, p->name, t->name);
        if (three) memcpy(name, t->name, HF_NAME), hf_convolution_name(name, piece, t->name);
        if (layer < c->num_hidden_layers && layer_is_linear(c, layer)) hf_hybrid_norm(family, t->name);
    }
    write->elements += parameter_file_elements(p);
}

// Adds Model.constants. Routers' biases are fp32; factors of layers have the folder's type.
static void hf_add_constants(HfWrite *write, const char *prefix, const DType *chosen) {
    const Model *model = &write->source->model;
    const DType own = write->like ? write->like->constants_type : write->source->places[0].type;
    float *values;
    for (size_t l = 0; l < model->config.num_hidden_layers; l++) {
        HfTensor *t = &write->tensors[write->count];
        t->elements = hf_layer_constants(model, prefix, l, &values, t->name);
        if (!t->elements) continue;
        t->constants = values, t->type = model->router_bias ? DTYPE_FP32 : chosen ? *chosen : own;
        t->bytes = t->elements * dtype_size(t->type);
        write->count++;
    }
}

// Adds the tensors of a quantised parameter.
static void hf_add_parts(HfWrite *write, size_t i, const char *prefix) {
    const Parameter *p = &write->source->model.parameters[i];
    const HfCodes *c = &write->codes;
    const char *const *ends = c->type == QUANT_FP8     ? hf_fp8_names
                              : c->type == QUANT_MXFP4 ? hf_mxfp4_names
                                                       : hf_part_names;
    char name[HF_NAME];
    write->elements += parameter_elements(p);
    for (size_t k = 0; k < HF_PARTS * hf_code_pieces(c, i); k++) {
        HfTensor *t = &write->tensors[write->count];
        uint64_t shape[4];
        const HfPart part = (HfPart)(k % HF_PARTS);
        const size_t rank = part ? hf_part_shape(c, i, part, shape, &t->dtype) : 0;
        if (!rank) continue;
        t->p = p, t->parameter = i, t->piece = k / HF_PARTS, t->part = part;
        t->bytes = strcmp(t->dtype, "F32") ? 1 : sizeof(float);
        for (size_t d = 0; d < rank; d++) t->bytes *= shape[d];
        snprintf(t->name, sizeof(t->name), "%s%s%s",
                 hf_piece_name(write->source->config.family, prefix, p, t->piece, name), ends[part],
                 part == HF_STATE ? quant_type_names[c->format[i].type] : "");
        write->count++;
    }
}

// Adds the tensors of a parameter of an FP8 folder: to copy, or of merged values.
static void hf_add_fp8(HfWrite *write, size_t i) {
    const WeightSource *source = write->source;
    write->elements += parameter_elements(&source->model.parameters[i]);
    for (size_t k = 0; k < 2 * source->records[i].pieces; k++) {
        HfTensor *t = &write->tensors[write->count++];
        t->other = &source->records[i].pair[k], t->from = source, t->bytes = t->other->end - t->other->begin;
        t->parameter = i, t->piece = k / 2;
        t->part = write->codes.copied[i] ? HF_VALUES : k % 2 ? HF_ABSMAX : HF_CODES;
        snprintf(t->name, sizeof(t->name), "%s", t->other->name);
    }
}

// Tells whether a tensor outside the text model has a meaning only in an FP8 folder.
static int hf_is_of_fp8(const WeightSource *from, const SafeTensor *t) {
    return hf_is_fp8(t) || hf_is_activation_scale(from, t->name) || text_ends_with(t->name, "_scale_inv");
}

static void hf_add_other(HfWrite *write, const WeightSource *from, const SafeTensor *other) {
    HfTensor *t = &write->tensors[write->count++];
    uint64_t elements = 1;
    t->other = other, t->from = from, t->bytes = other->end - other->begin;
    snprintf(t->name, sizeof(t->name), "%s", other->name);
    for (size_t i = 0; i < other->rank; i++) elements *= other->shape[i];
    write->elements += elements;
}

// Adds the first `count` tensors outside the text model of a folder. Those of FP8 stay in folders in FP8 alone.
static void hf_add_others(HfWrite *write, const WeightSource *from, size_t count, QuantType quant) {
    size_t left_out = 0;
    for (size_t i = 0; i < count; i++)
        if (quant != QUANT_FP8 && from->stored == QUANT_FP8 && hf_is_of_fp8(from, &from->others.tensors[i]))
            left_out++;
        else
            hf_add_other(write, from, &from->others.tensors[i]);
    if (left_out)
        note("%s: %zu tensors of FP8 outside the text model are left out; --to fp8 keeps them", from->path, left_out);
}

// Prepares writing. dtype: NULL keeps each tensor's type. kept: NULL for the folder of the source, if it has one.
// text_only: leaves out the parts of a composite model that are not text; with quant they are left out, too. quant,
// head: see hf_codes_choose
static HfWrite hf_write_prepare(WeightSource *source, const DType *dtype, const char *kept, size_t max_shard_size,
                                int text_only, QuantType quant, int head) {
    const size_t count = source->model.parameter_count;
    const Family *family = source->config.family;
    char prefix[64] = "";
    HfWrite write = {0};
    write.source = source, write.text_only = text_only, write.max_shard_size = max_shard_size;
    write.kept = kept ? kept : source->transposed ? source->path : NULL;
    if (write.kept) hf_check_kept(&write);
    hf_open_like(&write, source, quant);
    hf_check_class(&write);
    write.retype = dtype || kept;
    write.type = dtype ? *dtype : hf_has_forms(family) ? source->places[0].type : source->dtype;
    const WeightSource *const rest = write.like ? write.like : source;
    const size_t others = write.text_only || (!write.like && quant != QUANT_FP8) ? 0 : rest->others.count;
    size_t most = (quant ? HF_PARTS : 1) * count + others + 3 * source->config.num_hidden_layers;
    write.split = family->names.expert[0] != NULL;
    for (size_t i = 0; i < count; i++) {
        const int codes = quant == QUANT_FP8 && source->stored != QUANT_FP8; // of each expert's matrices
        const int fused = !codes && write.like && !source_is_in_pieces(write.like, i);
        if (!source->model.parameters[i].experts) continue;
        write.split &= !fused, most += 2 * parameter_pieces(family, &source->model.parameters[i]);
    }
    write.tensors = (HfTensor *)checked_calloc(most, sizeof(HfTensor), "the tensors to be written");
    memcpy(prefix, family->names.layer_prefix, strcspn(family->names.layer_prefix, ".") + 1); // "model."
    if (family->stored_as) snprintf(prefix, sizeof(prefix), "%s", family->stored_as);
    hf_codes_choose(&write.codes, source, quant, dtype, head);
    for (size_t i = 0; i < count; i++) {
        const char *begin = write.composite ? write.composite->prefix : prefix;
        if (hf_is_coded(&write.codes, i) && write.codes.keeps_fp8)
            hf_add_fp8(&write, i);
        else if (hf_is_coded(&write.codes, i))
            hf_add_parts(&write, i, begin);
        else
            hf_add_parameter(&write, i, begin, dtype);
    }
    hf_add_constants(&write, write.composite ? write.composite->prefix : prefix, dtype);
    hf_add_others(&write, rest, others, quant);
    hf_cut_shards(&write);
    return write;
}

static void hf_write_free(HfWrite *write) {
    if (write->like && write->like != write->source) weights_close(write->like);
    free(write->codes.format), free(write->codes.state), free(write->codes.copied), free(write->codes.record);
    free(write->codes.scales);
    free(write->tensors), free(write->chat.edits);
    tokenizer_close(write->chat.tokenizer);
}

static const char *hf_shard_name(const HfWrite *write, size_t shard, char name[64]) {
    if (write->shards == 1)
        snprintf(name, 64, "%s", HF_SINGLE_FILE);
    else
        snprintf(name, 64, "model-%05zu-of-%05zu.safetensors", shard + 1, write->shards);
    return name;
}

// ---- the tensors ----------------------------------------------------------------------------------------------------
// Writes the header of a file with tensors [t, end); file NULL: only computes sizes. Returns the offset of the data;
// *bytes: size of the file
static uint64_t hf_write_header(const HfWrite *write, const HfTensor *t, const HfTensor *end, const OutputFile *file,
                                uint64_t *bytes) {
    SafetensorsWriter writer;
    safetensors_write_begin(&writer, file, NULL, 0, NULL, NULL);
    for (; t < end; t++) {
        const SafeTensor *other = t->other;
        const char *dtype = t->dtype;
        uint64_t shape[4];
        if (other)
            safetensors_write_tensor(&writer, t->name, other->dtype, other->shape, other->rank, t->bytes);
        else if (t->part)
            safetensors_write_tensor(&writer, t->name, dtype, shape,
                                     hf_part_shape(&write->codes, t->parameter, t->part, shape, &dtype), t->bytes);
        else if (t->constants || (write->split && t->p->experts)) {
            shape[0] = t->constants ? t->elements : t->elements / t->p->cols, shape[1] = t->constants ? 1 : t->p->cols;
            safetensors_write_tensor(&writer, t->name, safetensors_dtypes[t->type].name, shape, t->constants ? 1 : 2,
                                     t->bytes);
        } else if (t->elements < parameter_file_elements(t->p)) { // a part of a convolution
            shape[0] = t->elements / t->p->cols, shape[1] = 1, shape[2] = t->p->cols;
            safetensors_write_tensor(&writer, t->name, safetensors_dtypes[t->type].name, shape, 3, t->bytes);
        } else {
            safetensors_write_named(&writer, t->name, t->p, t->type);
        }
    }
    const uint64_t at = safetensors_write_end(&writer);
    *bytes = at + writer.data;
    return at;
}

// Reads elements [begin, begin + count) of a tensor of the folder. If the tensor joins tensors of all layers, reads
// from all of them.
static void hf_read_tensor(const HfWrite *write, const HfTensor *t, size_t begin, size_t count) {
    const size_t run = t->p->joined ? joined_run(t->p) : 0, row = run * t->p->joined;
    const Parameter *parameters = write->source->model.parameters;
    if (!run) {
        source_read_finite(write->source, t->parameter, begin, count, t->type, 1, staged.bytes);
        return;
    }
    for (size_t done = 0, n; done < count; done += n) {
        const size_t at = begin + done, part = at / run % t->p->joined;
        size_t i = t->parameter; // the first part; the remaining parts follow it
        while (parameters[i].part != part || strcmp(parameters[i].name, t->p->name) != 0) i++;
        n = min_size(count - done, run - at % run);
        source_read_finite(write->source, i, at / row * run + at % run, n, t->type, 1,
                           staged.bytes + done * dtype_size(t->type));
    }
}

static void hf_write_shard(HfWrite *write, size_t begin, size_t end, OutputFolder *folder, Progress *progress,
                           double *done) {
    const HfTensor *first = write->tensors + begin, *last = write->tensors + end;
    char name[64];
    OutputFile file;
    uint64_t bytes, at = hf_write_header(write, first, last, NULL, &bytes);
    size_t n;
    folder_open_file(folder, &file, hf_shard_name(write, first->shard, name), bytes);
    hf_write_header(write, first, last, &file, &bytes);
    for (const HfTensor *t = first; t < last; t++) {
        if (t->other && !t->part) hf_copy_tensor(&t->from->files[t->other->file], t->other, &file, at);
        if (t->part)
            output_write(&file, at, hf_part_bytes(&write->codes, t->parameter, t->part, t->piece), (size_t)t->bytes);
        if (t->constants) {
            elements_convert(staged.bytes, t->type, t->constants, DTYPE_FP32, t->elements);
            output_write(&file, at, staged.bytes, (size_t)t->bytes);
        }
        for (size_t i = 0; t->p && !t->part && i < t->elements; i += n) {
            n = min_size(t->elements - i, SLAB_ELEMENTS);
            hf_read_tensor(write, t, t->first + i, n);
            output_write(&file, at + i * dtype_size(t->type), staged.bytes, n * dtype_size(t->type));
            progress_update(progress, *done + (double)(i * dtype_size(t->type)));
        }
        at += t->bytes;
        progress_update(progress, *done += (double)t->bytes);
    }
    output_commit(&file);
}

// Writes the index: each tensor's name and file. Leaves the tensors sorted by name.
static void hf_write_index(HfWrite *write, OutputFolder *folder) {
    // One line: an escaped name, and a file name of 64 bytes.
    const size_t room = 256 + write->count * (2 * HF_NAME + 100);
    char *text = (char *)checked_malloc(room, "an index of tensors"), name[64];
    JsonOut json = json_open_text(text, room, JSON_INDENTED);
    json_object(&json, "metadata");
    json_size(&json, "total_parameters", (size_t)write->elements);
    json_size(&json, "total_size", (size_t)write->bytes);
    json_object_end(&json);
    json_object(&json, "weight_map");
    qsort(write->tensors, write->count, sizeof(*write->tensors), compare_texts);
    for (const HfTensor *t = write->tensors; t < write->tensors + write->count; t++)
        json_text(&json, t->name, hf_shard_name(write, t->shard, name));
    json_object_end(&json);
    const size_t used = json_text_end(&json);
    folder_write_file(folder, HF_INDEX_FILE, text, used);
    free(text);
}

// ---- the whole folder -----------------------------------------------------------------------------------------------
// Changes type, rotary positions and vocabulary in a config.json or its text_config. text: has room for more. Returns
// the new length.
static size_t hf_edit_config(const HfWrite *write, char *text, size_t length) {
    if (write->retype) length = hf_config_with_type(text, length, write->type);
    if (write->rescale) length = hf_config_with_rope(text, length, &write->source->config);
    if (write->regrow) {
        char size[32];
        const int bytes = snprintf(size, sizeof(size), "%zu", write->source->config.vocab_size);
        length = hf_config_replace(text, length, "vocab_size", size, (size_t)bytes, 1);
    }
    return length;
}

// Edits the config.json of a composite model like hf_edit_config: text_config has positions and vocabulary, both
// objects have the type.
static size_t hf_edit_composite(const HfWrite *write, char *text, size_t length) {
    size_t begin, end;
    if (write->retype) length = hf_config_with_type(text, length, write->type);
    if (!json_value_span(text, length, "text_config", &begin, &end)) return length;
    char *inner = (char *)checked_malloc(end - begin + 64 + HF_ROPE_TEXT, "text_config");
    memcpy(inner, text + begin, end - begin);
    inner[end - begin] = 0;
    const size_t bytes = hf_edit_config(write, inner, end - begin);
    memmove(text + begin + bytes, text + end, length - end + 1);
    memcpy(text + begin, inner, bytes);
    free(inner);
    return length - (end - begin) + bytes;
}

// Sets quantization_config to the written format; one of mxfp4 or FP8 stays. Takes ownership of text; the caller
// frees the result.
static char *hf_edit_quantisation(const HfWrite *write, char *text, size_t *length) {
    size_t begin, end;
    if (write->codes.type == QUANT_MXFP4 && json_value_span(text, *length, "quantization_config", &begin, &end)) {
        const char *method = strstr(text + begin, "\"mxfp4\"");
        if (method && method < text + end) return text;
    }
    if (write->codes.keeps_fp8) return text;
    *length = hf_config_without(text, *length, "quantization_config");
    if (!write->codes.format) return text;
    char *value = hf_quantisation_text(&write->codes);
    const size_t bytes = strlen(value);
    char *out = (char *)checked_malloc(*length + bytes + 128, "config.json");
    memcpy(out, text, *length + 1);
    *length = hf_config_replace(out, *length, "quantization_config", value, bytes, 1);
    free(text), free(value);
    return out;
}

static void hf_write_config(const HfWrite *write, OutputFolder *folder) {
    char path[PATH_MAX], *out;
    size_t length = 0;
    if (write->kept && !write->text_only) {
        path_join(path, write->kept, "config.json");
        hf_check_link(write->kept, path);
        char *text = input_read_text(path, HF_CONFIG_MAX, &length);
        out = (char *)checked_malloc(length + 128 + HF_ROPE_TEXT, path);
        memcpy(out, text, length + 1);
        length = write->composite ? hf_edit_composite(write, out, length) : hf_edit_config(write, out, length);
        free(text);
    } else {
        out = (char *)checked_malloc(HF_CONFIG_TEXT, "config.json");
        length = hf_config_write(&write->source->config, write->type, out);
    }
    out = hf_edit_quantisation(write, out, &length);
    folder_write_file(folder, "config.json", out, length);
    free(out);
}

// Writes the small files of the kept folder, with the chat of the tokenizer file, and this tokenizer file.
static void hf_write_kept(const HfWrite *write, OutputFolder *folder, HfKeptFiles *kept) {
    const HfChat *chat = &write->chat;
    char from[PATH_MAX];
    size_t length;
    if (write->kept && !folder_has(write->kept, HF_GENERATION)) hf_add_kept(kept, HF_GENERATION); // chat may need it
    for (size_t i = 0; i < kept->count; i++) {
        const char *name = kept->names[i];
        if (chat->tokenizer && !strcmp(name, TOKENIZER_NAME)) continue;
        if (chat->bytes && !strcmp(name, TEMPLATE_NAME)) continue;
        path_join(from, write->kept, name);
        char *text = hf_chat_edit(chat, from, name, &length);
        if (text)
            folder_write_file(folder, name, text, length);
        else if (path_exists(from))
            hf_copy_file(folder, from, name);
        free(text);
    }
    if (chat->tokenizer) hf_copy_file(folder, write->tokenizer, TOKENIZER_NAME);
    if (chat->bytes) folder_write_file(folder, TEMPLATE_NAME, chat->tokenizer->section[SECTION_TEMPLATE], chat->bytes);
}

// Writes the folder. Reports faults of the place, the models or the disk before the first weight is read. replaces: an
// existing folder of model files may be replaced
static void hf_write(HfWrite *write, const char *path, int replaces) {
    size_t count = write->count, end;
    HfKeptFiles kept = {NULL, 0, 0};
    OutputFolder folder;
    double done = 0;
    const char *also = write->composite ? write->codes.keeps_fp8 ? HF_IMAGE_NAMES "|" HF_MODELOPT : HF_IMAGE_NAMES
                       : write->codes.keeps_fp8 ? HF_MODELOPT
                                                : "";
    if (write->kept) hf_find_kept(&kept, write->kept, "", also);
    folder_open(&folder, path, write->bytes + kept.bytes + count * 1024 + HF_CONFIG_TEXT,
                write->shards + kept.count + 6, hf_is_written_name, replaces);
    hf_write_config(write, &folder);
    hf_write_kept(write, &folder, &kept);
    free(kept.names);
    size_t length;
    char *card = model_card(write->source, write->kept, write->type, path, &length);
    folder_write_file(&folder, "README.md", card, length);
    free(card);
    Progress progress = progress_begin(stderr, "converting", 0, (double)write->bytes);
    for (size_t begin = 0; begin < count; begin = end) {
        for (end = begin; end < count && write->tensors[end].shard == write->tensors[begin].shard;) end++;
        hf_write_shard(write, begin, end, &folder, &progress, &done);
    }
    if (write->shards > 1) hf_write_index(write, &folder);
    progress_end(&progress);
    folder_commit(&folder);
}

#endif
