/*
Reads and writes llm.c's GPT-2 checkpoints (gpt2_124M.bin, gpt2_124M_bf16.bin and checkpoints of its trainers). A header
of 256 int32: magic 20240326, version (3 fp32, 5 bf16), positions, vocabulary, layers, heads, channels, padded
vocabulary. Then wte [padded vocabulary, C], wpe [positions, C], each kind of layer tensor for all layers together, and
the last norm. Matrices are [out, in], like ours; the padding rows of wte are skipped.
*/
#ifndef LLMC_LLMC_GPT2_H
#define LLMC_LLMC_GPT2_H
#include "weight_source.h"

#define LLMC_MODEL_MAGIC    20240326
#define LLMC_MAGIC_SWAPPED  ((int32_t)__builtin_bswap32(LLMC_MODEL_MAGIC)) // the magic in the other byte order
#define LLMC_HEADER_INTS    256
#define LLMC_VOCAB_MULTIPLE 128

// Locates the tensors in the file's order: wte and wpe, then each kind of layer tensor over all layers, then the last
// norm. In our table a layer's parameters are contiguous instead. Returns the offset where the file must end.
static uint64_t llmc_locate_tensors(WeightSource *source, DType type, uint64_t padded_vocab) {
    const Model *model = &source->model;
    const size_t count = model->parameter_count, layers = model->config.num_hidden_layers, kinds = (count - 4) / layers;
    uint64_t at = LLMC_HEADER_INTS * sizeof(int32_t);
    for (size_t k = 0; k < count; k++) {
        const size_t i = k < 2 || k >= count - 2 ? k : 2 + (k - 2) % layers * kinds + (k - 2) / layers;
        const TensorLocation place = {0, at, type, 0};
        source->places[i] = place;
        at += (i ? parameter_elements(&model->parameters[i]) : padded_vocab * model->config.hidden_size) *
              dtype_size(type);
    }
    return at;
}

static void llmc_gpt2_open(WeightSource *source) {
    int32_t header[LLMC_HEADER_INTS];
    char text[256];
    const char *path = source->path;
    source_open_header(source, "llm.c GPT-2 .bin", header, sizeof(header));
    if (header[0] == LLMC_MAGIC_SWAPPED)
        die("%s: was written on a machine of the other byte order; write it again on this machine", path);
    if (header[0] != LLMC_MODEL_MAGIC)
        die("%s: is not an llm.c model (magic %d); give a file that llm.c's train_gpt2.py wrote", path, header[0]);
    if (header[1] != 3 && header[1] != 5)
        die("%s: is an llm.c model of version %d, not 3 (fp32) or 5 (bf16); write it again with a newer llm.c", path,
            header[1]);
    DType type = header[1] == 3 ? DTYPE_FP32 : DTYPE_BF16;
    snprintf(text, sizeof(text),
             "gpt2,max_position_embeddings=%d,vocab_size=%d,num_hidden_layers=%d,num_attention_heads=%d,hidden_size=%d",
             header[2], header[3], header[4], header[5], header[6]);
    source->config = config_from_text(text, path, EXIT_RUNTIME);
    if (header[7] < header[3] || header[7] > 1 << 25)
        die("%s: the padded vocabulary %d must be at least the vocabulary %d and at most 2^25; write the file again",
            path, header[7], header[3]);
    source_set_table(source, model_build(&source->config, type));
    source_check_end(source, llmc_locate_tensors(source, type, (uint64_t)header[7]));
}

// ---- writing: the vocabulary is padded with rows of zeros, as llm.c's own are ---------------------------------------
// Refuses a model that differs from constants in llm.c's code. The file does not hold these.
static void llmc_gpt2_check(const WeightSource *source) {
    const Config *c = &source->config;
    const char *fault = strcmp(c->family->name, "gpt2") != 0                     ? "is not of the family gpt2"
                        : !c->tie_word_embeddings                                ? "has an untied head"
                        : c->intermediate_size != 4 * c->hidden_size             ? "has an MLP that is not 4 x as wide"
                        : c->num_attention_heads * c->head_dim != c->hidden_size ? "has heads of another width"
                        : fabs(c->norm_eps - 1e-5) > 1e-12                       ? "has another layer_norm_epsilon"
                                                                                 : NULL;
    if (fault) die("%s: %s, so llm.c cannot hold it; give --to flat or --to hf", source->path, fault);
}

static void llmc_gpt2_write(const WeightSource *source, const char *path, DType dtype) {
    const Config *c = &source->config;
    const size_t padded = (c->vocab_size + LLMC_VOCAB_MULTIPLE - 1) / LLMC_VOCAB_MULTIPLE * LLMC_VOCAB_MULTIPLE;
    const int32_t header[LLMC_HEADER_INTS] = {LLMC_MODEL_MAGIC,
                                              dtype == DTYPE_FP32 ? 3 : 5,
                                              (int32_t)c->max_position_embeddings,
                                              (int32_t)c->vocab_size,
                                              (int32_t)c->num_hidden_layers,
                                              (int32_t)c->num_attention_heads,
                                              (int32_t)c->hidden_size,
                                              (int32_t)padded};
    const size_t size = dtype_size(dtype);
    WeightSource target = *source;
    OutputFile output;
    llmc_gpt2_check(source);
    if (dtype != DTYPE_FP32 && dtype != DTYPE_BF16)
        die("%s: llm.c's files are fp32 or bf16, not %s; give --dtype", path, dtype_name(dtype));
    weights_check_output(source, dtype);
    source_set_table(&target, source->model);
    output_open(&output, path, llmc_locate_tensors(&target, dtype, padded));
    output_write(&output, 0, header, sizeof(header));
    for (Slabs s = slabs_of_all(&target.model, "converting"); slabs_next(&s);) { // padding rows stay zero
        source_read_finite(source, s.parameter, s.begin, s.count, dtype, 0, staged.bytes);
        output_write(&output, target.places[s.parameter].offset + s.begin * size, staged.bytes, s.count * size);
    }
    output_commit(&output);
    free(target.places);
}

#endif
