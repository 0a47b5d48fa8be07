/*
Writing llm.c's GPT-2 checkpoints, which its trainers start from (llmc_gpt2.h says how they lie). The vocabulary is
padded with rows of zeros, as llm.c's own are. Nothing of the model is held.
*/
#ifndef LLMC_LLMC_GPT2_WRITE_H
#define LLMC_LLMC_GPT2_WRITE_H
#include "weights.h"

#define LLMC_VOCAB_MULTIPLE 128

// llm.c has these numbers in its code, not in the file.
static void llmc_gpt2_check(const WeightSource *source) {
    const Config *c = &source->config;
    const char *fault = strcmp(c->family->name, "gpt2") != 0                     ? "is not of the family gpt2"
                        : !c->tie_word_embeddings                                ? "has a head of its own"
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
    WeightSource target = *source;
    OutputFile output;
    size_t n;
    llmc_gpt2_check(source);
    if (dtype != DTYPE_FP32 && dtype != DTYPE_BF16)
        die("%s: llm.c's files are fp32 or bf16, not %s; give --dtype", path, dtype_name(dtype));
    weights_check_output(source, path, dtype);
    target.places =
        (TensorLocation *)checked_calloc(target.model.parameter_count, sizeof(TensorLocation), "the tensors' places");
    uint64_t bytes = llmc_place_tensors(&target, dtype, padded);
    output_open(&output, path, bytes);
    output_write(&output, 0, header, sizeof(header));
    for (size_t i = 0; i < target.model.parameter_count; i++) { // what no tensor covers is a hole in the file: zeros
        const size_t elements = parameter_elements(&target.model.parameters[i]);
        for (size_t begin = 0; begin < elements; begin += n) {
            n = min_size(elements - begin, SLAB_ELEMENTS);
            weights_read(source, i, begin, n, dtype, staged.bytes);
            output_write(&output, target.places[i].offset + (uint64_t)begin * dtype_size(dtype), staged.bytes,
                         n * dtype_size(dtype));
        }
    }
    output_commit(&output);
    free(target.places);
}

#endif
