/*
Writes adapters with one tensor per matrix of an expert, for engines that load experts one by one:

    ...mlp.experts.N.gate_proj.lora_A  [r,in]    the same A for up_proj
    ...mlp.experts.N.gate_proj.lora_B  [I,r]     upper rows of B (up_proj: lower rows), or every other row

adapter_file.h reads such a folder, too. Other tensors have PEFT's form.
*/
#ifndef LLMC_ADAPTER_SPLIT_H
#define LLMC_ADAPTER_SPLIT_H
#include "adapter_file.h"

// A tensor of the file: `count` elements of a parameter of the adapters from `first` on, in memory order if split. run:
// 0, or this tensor and a second tensor alternate in memory, `run` elements each
typedef struct {
    char name[256];
    size_t first, count, run;
    uint64_t shape[3];
    size_t rank;
    int split;
} AdapterPiece;

// Describes the i-th tensor of a parameter. Returns 0 if it has fewer tensors.
static int adapter_piece(const Lora *lora, const Parameter *p, size_t i, AdapterPiece *piece) {
    const Config *c = &lora->table.config;
    const size_t layer = group_of(&lora->table, p->offset), count = parameter_elements(p);
    const LayerTensor tensor = adapter_tensor_of(lora, p);
    const int down = tensor == EXPERTS_DOWN, of_b = p->file_rows != 0;
    char name[160];
    piece->split = lora_is_stack(tensor), piece->first = 0, piece->count = count, piece->run = 0;
    if (!piece->split) {
        const int used = snprintf(piece->name, sizeof(piece->name), "base_model.model.");
        const int layers =
            snprintf(name, sizeof(name), c->family->names.layer_prefix, layer < GROUP_EMBEDDING ? layer : 0);
        piece->rank = parameter_shape(p, piece->shape);
        if (tensor == ROUTER_WEIGHT && c->family->names.router)
            snprintf(piece->name + used, sizeof(piece->name) - (size_t)used, "%.*s%.*s%s", layers, name,
                     (int)lora_name_length(c->family->names.router), c->family->names.router,
                     strstr(p->name, ".lora_"));
        else
            snprintf(piece->name, sizeof(piece->name), "%s", p->name);
        return i == 0;
    }
    const size_t parts = down ? 1 : expert_parts(c->family), expert = i / parts, rank = lora_part_of(lora, p)->rank;
    if (expert == c->num_experts) return 0;
    lora_expert_name(c->family, layer, expert, down ? 2 : i % parts, name);
    snprintf(piece->name, sizeof(piece->name), "base_model.model.%s.lora_%c.weight", name, of_b ? 'B' : 'A');
    piece->count = count / c->num_experts / (of_b ? parts : 1);
    piece->first = (of_b ? i : expert) * piece->count, piece->rank = 2;
    piece->shape[0] = of_b ? piece->count / rank : rank, piece->shape[1] = of_b ? rank : piece->count / rank;
    if (of_b && !down && lora_rows_alternate(c->family))
        piece->run = rank, piece->first = expert * 2 * piece->count + i % 2 * rank;
    return 1;
}

// Reads elements [begin, begin + count) of a tensor. begin and count are multiples of the tensor's run.
static void adapter_piece_read(const WeightSource *adapter, size_t parameter, const AdapterPiece *piece, size_t begin,
                               size_t count, DType type) {
    const size_t run = piece->run, bytes = run * dtype_size(type);
    source_read_finite(adapter, parameter, piece->first + (run ? 2 * begin : begin), run ? 2 * count - run : count,
                       type, !piece->split, staged.bytes);
    for (size_t i = 1; run && i < count / run; i++)
        memcpy(staged.bytes + i * bytes, staged.bytes + 2 * i * bytes, bytes);
}

// Writes the header; file NULL: only counts the header's bytes. Returns the header's length; *bytes: size of the whole
// file
static uint64_t adapter_split_header(const WeightSource *adapter, const Lora *lora, const BaseKey *base,
                                     const OutputFile *file, uint64_t *bytes) {
    SafetensorsWriter writer;
    AdapterPiece piece;
    adapter_write_begin(&writer, file, NULL, 0, base);
    for (size_t k = 0; k < lora->table.parameter_count; k++) {
        const DType type = adapter->places[k].type;
        for (size_t i = 0; adapter_piece(lora, &lora->table.parameters[k], i, &piece); i++)
            safetensors_write_tensor(&writer, piece.name, safetensors_dtypes[type].name, piece.shape, piece.rank,
                                     (uint64_t)piece.count * dtype_size(type));
    }
    const uint64_t length = safetensors_write_end(&writer);
    *bytes = length + writer.data;
    return length;
}

// Writes adapter_model.safetensors, of `bytes` bytes, and adapter_config.json with a tensor per matrix of an expert.
// base: --model
static void adapter_split_write(const WeightSource *adapter, Lora *lora, const BaseKey *key, const char *base,
                                OutputFolder *folder, uint64_t bytes) {
    static char text[ADAPTER_CONFIG_TEXT];
    AdapterPiece piece;
    OutputFile file;
    size_t n;
    folder_open_file(folder, &file, ADAPTER_FILE_NAME, bytes);
    uint64_t at = adapter_split_header(adapter, lora, key, &file, &bytes);
    for (size_t k = 0; k < lora->table.parameter_count; k++) {
        const DType type = adapter->places[k].type;
        for (size_t i = 0; adapter_piece(lora, &lora->table.parameters[k], i, &piece); i++)
            for (size_t done = 0; done < piece.count; done += n, at += n * dtype_size(type)) {
                n = min_size(piece.count - done, piece.run ? SLAB_ELEMENTS / 2 / piece.run * piece.run : SLAB_ELEMENTS);
                adapter_piece_read(adapter, k, &piece, done, n, type);
                output_write(&file, at, staged.bytes, n * dtype_size(type));
            }
    }
    output_commit(&file);
    lora->split = 1;
    folder_write_file(folder, ADAPTER_CONFIG_NAME, text, adapter_config_text(lora, base, text, folder->path));
}

#endif
