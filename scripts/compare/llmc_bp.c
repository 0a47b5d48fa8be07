/*
One forward and backward pass of llm.c, several times, as a contender of compare.py: llmc_bp.sh converts the model, builds this against the
user's checkout (llmc_bp.h) and starts it. The result is one JSON object, the last line on standard output; what llm.c prints goes
to standard error.
*/
#define PROGRAM_NAME "llmc_bp"
#include <fnmatch.h>
#include "../../llmc/dataloader.h"
#include "../../llmc/json_out.h"
#include "../../llmc/weights.h"
#include "llmc_bp.h"

typedef struct {
    const char *checkpoint, *tokens, *version, *grads_out, *grads_of; // grads_of: "GLOB,GLOB", NULL: all
    size_t seq_len, batch, repeat, limit, recompute;
} Arguments;

typedef struct {
    double loss, grad_norm;
    double *seconds; // [repeat]
    size_t peak_bytes;
} Result;

static Arguments arguments_parse(int argc, char **argv) {
    Arguments a = {NULL, NULL, "unknown", NULL, NULL, 0, 1, 3, 0, 1};
    const struct {
        const char *name, **text;
        size_t *number;
    } rows[] = {{"--checkpoint", &a.checkpoint, NULL}, {"--tokens", &a.tokens, NULL},
                {"--version", &a.version, NULL},       {"--grads-out", &a.grads_out, NULL},
                {"--grads-of", &a.grads_of, NULL},     {"--seq-len", NULL, &a.seq_len},
                {"--batch", NULL, &a.batch},           {"--repeat", NULL, &a.repeat},
                {"--memory-limit", NULL, &a.limit},    {"--recompute", NULL, &a.recompute}};
    const size_t count = sizeof(rows) / sizeof(rows[0]);
    size_t row;
    int i;
    for (i = 1; i < argc; i += 2) {
        for (row = 0; row < count && strcmp(argv[i], rows[row].name) != 0; row++) continue;
        if (row == count || i + 1 == argc) die_usage("%s: not an option, or without its value", argv[i]);
        if (rows[row].text)
            *rows[row].text = argv[i + 1];
        else if (!parse_size(argv[i + 1], rows[row].number))
            die_usage("%s %s: is not a whole number", argv[i], argv[i + 1]);
    }
    if (!a.checkpoint || !a.tokens || !a.seq_len || !a.batch || !a.repeat)
        die_usage("--checkpoint, --tokens and --seq-len are needed, and no number is 0");
    return a;
}

// ---- gradients: llm.c's run of parameters lies as in its checkpoint, which `source` is ----------------------------------------------
// Elements begin .. begin + n of a parameter, at most SLAB_ELEMENTS, in the order of the parameter table.
static const float *gradient_read(const WeightSource *source, size_t parameter, size_t begin, size_t n) {
    const TensorPlace *place = &source->places[parameter];
    const uint64_t first = (place->offset - LLMC_HEADER_INTS * sizeof(int32_t)) / dtype_size(place->type);
    float *values = (float *)(void *)staged_reformed.bytes;
    peer_gradients((size_t)first + begin, n, values);
    return values;
}

static double gradient_sum_of_squares(const WeightSource *source) {
    double sum = 0;
    size_t i, begin, n, k;
    for (i = 0; i < source->model.parameter_count; i++) {
        const size_t elements = parameter_elements(&source->model.parameters[i]);
        for (begin = 0; begin < elements; begin += n) {
            const float *values = gradient_read(source, i, begin, n = min_size(elements - begin, SLAB_ELEMENTS));
            for (k = 0; k < n; k++) sum += (double)values[k] * (double)values[k];
        }
    }
    return sum;
}

// Whether a name matches one of "GLOB,GLOB"; NULL matches all.
static int is_chosen(const char *name, const char *globs) {
    char glob[256];
    size_t length;
    if (!globs) return 1;
    for (; *globs; globs += length + (globs[length] == ',')) {
        length = strcspn(globs, ",");
        snprintf(glob, sizeof(glob), "%.*s", (int)length, globs);
        if (!fnmatch(glob, name, 0)) return 1;
    }
    return 0;
}

static uint64_t chosen_header(const OutputFile *file, const Model *model, const char *globs, uint64_t *bytes) {
    SafetensorsWriter writer = safetensors_write_begin(file);
    size_t i;
    for (i = 0; i < model->parameter_count; i++)
        if (is_chosen(model->parameters[i].name, globs))
            safetensors_write_entry(&writer, &model->parameters[i], DTYPE_FP32);
    *bytes = writer.data;
    return safetensors_write_end(&writer);
}

static void chosen_write(const WeightSource *source, const char *path, const char *globs) {
    const Model *model = &source->model;
    uint64_t bytes, at = chosen_header(NULL, model, globs, &bytes);
    OutputFile output;
    size_t i, begin, n;
    if (!bytes) die("--grads-of %s: no parameter has such a name", globs);
    output_open(&output, path, at + bytes);
    chosen_header(&output, model, globs, &bytes);
    for (i = 0; i < model->parameter_count; i++) {
        const Parameter *p = &model->parameters[i];
        const size_t elements = parameter_elements(p);
        if (!is_chosen(p->name, globs)) continue;
        for (begin = 0; begin < elements; begin += n) {
            const float *values = gradient_read(source, i, begin, n = min_size(elements - begin, SLAB_ELEMENTS));
            if (p->transposed)
                gradients_write_transposed(&output, at, p, begin, n, values);
            else
                output_write(&output, at + (uint64_t)begin * sizeof(float), values, n * sizeof(float));
        }
        at += (uint64_t)elements * sizeof(float);
    }
    output_commit(&output);
}

// ---- the passes and their result ----------------------------------------------------------------------------------------------------
// The first B x T tokens, each with the one behind it as its target.
static Batch tokens_read(const Arguments *a, size_t vocab_size) {
    DataSettings settings;
    DataLoader loader;
    Batch batch;
    memset(&settings, 0, sizeof(settings));
    settings.B = a->batch, settings.T = a->seq_len, settings.vocab_size = vocab_size;
    settings.shuffle = SHUFFLE_OFF;
    loader = dataloader_open(&a->tokens, 1, &settings);
    if (loader.of_documents) die("%s: holds documents of any length; give one of llm.c's shards", a->tokens);
    batch = dataloader_batch(&loader);
    dataloader_next(&loader, &batch);
    dataloader_close(&loader);
    return batch;
}

// result NULL: it did not fit into memory
static void result_print(FILE *file, const Arguments *a, const Result *result) {
    JsonOut json = json_open(file);
    size_t i;
    json_object(&json, NULL);
    json_text(&json, "contender", "llmc");
    if (result) {
        json_number(&json, "loss", result->loss);
        json_number(&json, "grad_norm", result->grad_norm);
        json_array(&json, "seconds");
        for (i = 0; i < a->repeat; i++) json_number(&json, NULL, result->seconds[i]);
        json_array_end(&json);
        json_size(&json, "peak_bytes", result->peak_bytes);
    }
    json_text(&json, "peak_of", peer_peak_of);
    json_text(&json, "attention", peer_attention);
    json_text(&json, "dtype", peer_dtype);
    json_object(&json, "versions");
    json_text(&json, "llm.c", a->version);
    json_object_end(&json);
    json_text(&json, "error", result ? NULL : "out of memory");
    json_object_end(&json);
    json_finish(&json);
}

int main(int argc, char **argv) {
    const Arguments a = arguments_parse(argc, argv);
    const PeerSettings settings = {a.batch, a.seq_len, a.limit, (int)a.recompute};
    FILE *out = fdopen(dup(STDOUT_FILENO), "w");
    WeightSource *source = weights_open(a.checkpoint);
    const size_t positions = source->config.max_position_embeddings;
    Batch batch;
    Result result;
    size_t i;
    if (!out || dup2(STDERR_FILENO, STDOUT_FILENO) < 0) die("standard output: %s", strerror(errno));
    if (a.seq_len > positions)
        die("--seq-len %zu: this model has %zu positions, and llm.c reads none beyond; give a shorter one", a.seq_len,
            positions);
    batch = tokens_read(&a, source->config.vocab_size);
    result.seconds = (double *)checked_calloc(a.repeat, sizeof(double), "timings");
    if (!peer_open(a.checkpoint, &settings)) {
        result_print(out, &a, NULL);
        return 0;
    }
    for (i = 0; i < a.repeat; i++) result.loss = peer_pass(batch.tokens, batch.targets, &result.seconds[i]);
    result.peak_bytes = peer_peak_bytes();
    result.grad_norm = sqrt(gradient_sum_of_squares(source));
    if (a.grads_out) chosen_write(source, a.grads_out, a.grads_of);
    result_print(out, &a, &result);
    return 0;
}
